"""Supervised examples: a conversation as token ids, and which of them the model learns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_core.errors import BadInputError

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_example(
    row: Mapping[str, Any], tokenizer: Any, max_length: int | None = None, train_on_prompt: bool = False
) -> dict[str, npt.NDArray[Any]] | None:
    """Token ids of one row, and the mask of the tokens that are learned.

    ``input_ids`` with a ``loss_mask`` are taken as they are. ``messages`` (and ``tools``, if there are any) go through
    the tokenizer's chat template, and what the assistant says is learned, in every turn, its end-of-turn token
    included. Where the template marks it with ``{% generation %}`` that counts; else a turn's text is what the
    rendered conversation has beyond the prompt before it; where a token would span both, they are tokenised apart, as
    they are when the model generates. The first token is never learned: nothing predicts it.

    Args:
        row: one row of a dataset of kind ``sft``.
        tokenizer: a transformers tokenizer.
        max_length: most tokens; None: no bound.
        train_on_prompt: learn every token.

    Returns:
        ``input_ids`` int64 ``[L]`` and ``loss_mask`` bool ``[L]``; None if the row is longer than ``max_length`` or has
        no token to learn.

    Raises:
        BadInputError: if the row has no usable columns, the tokenizer no chat template, or the template rejects or
            rewrites the conversation.
    """
    if "input_ids" in row:
        input_ids, loss_mask = _given_tokens(row)
    else:
        input_ids, loss_mask = _encode_chat(_messages(row), row, tokenizer)
    if max_length is not None and len(input_ids) > max_length:
        return None
    if train_on_prompt:
        loss_mask = np.ones(len(input_ids), np.bool_)
    loss_mask[:1] = False
    if not loss_mask.any():
        return None
    return {"input_ids": input_ids, "loss_mask": loss_mask}


def _given_tokens(row: Mapping[str, Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    if "loss_mask" not in row:
        raise BadInputError(f"{_name(row)} has the columns {_columns(row)}: input_ids needs a loss_mask beside it")
    try:
        ids, mask = np.array(row["input_ids"], np.int64), np.array(row["loss_mask"], np.bool_)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{_name(row)}: input_ids and loss_mask must be lists of numbers ({error})") from error
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise BadInputError(
            f"{_name(row)}: input_ids has shape {ids.shape} and loss_mask {mask.shape}; two equal lengths are needed"
        )
    return ids, mask


def _messages(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if "messages" not in row:
        raise BadInputError(
            f"{_name(row)} has the columns {_columns(row)}; SFT needs `messages` (a chat that ends with the "
            "assistant), or `input_ids` with `loss_mask`"
        )
    messages = row["messages"]
    well_formed = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not well_formed or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise BadInputError(f"{_name(row)}: `messages` must be a list of dicts with `role` and `content`")
    if not any(message["role"] == "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise BadInputError(f"{_name(row)}: `messages` has the roles {roles}, but no assistant to learn from")
    return messages


def _encode_chat(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], tokenizer: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    from jinja2.exceptions import TemplateError

    template = _chat_template(tokenizer)
    tools = row.get("tools") or None
    try:
        if _GENERATION_BLOCK.search(template) and getattr(tokenizer, "is_fast", False):
            encoded = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return np.array(encoded["input_ids"], np.int64), np.array(encoded["assistant_masks"], np.bool_)
        return _encode_by_prefix(messages, tools, row, tokenizer)
    except TemplateError as error:
        raise BadInputError(f"{_name(row)}: the chat template rejects `messages`: {error}") from error


def _chat_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise BadInputError(
            f"tokenizer_path: the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has "
            "no chat template, so `messages` cannot be rendered. Use the tokenizer of an instruction-tuned model, add "
            "chat_template.jinja to its folder, or give `input_ids` with `loss_mask`."
        )
    return template if isinstance(template, str) else str(tokenizer.get_chat_template())


def _encode_by_prefix(
    messages: Sequence[Mapping[str, Any]], tools: Any, row: Mapping[str, Any], tokenizer: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    def render(count: int, *, generation_prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages[:count]), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        )

    whole = render(len(messages))
    cuts: list[tuple[int, bool]] = []  # Where a span of `whole` ends, and whether it is learned.
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through_answer = render(index), render(index + 1)
        if whole.startswith(before) and whole.startswith(through_answer):
            # Some templates open a fresh answer with more than an old one has (a thinking block): where they part the
            # answer begins.
            shared = _shared_prefix(render(index, generation_prompt=True), through_answer)
            cuts += [(max(shared, len(before)), False), (len(through_answer), True)]
        elif index + 1 == len(messages):
            raise BadInputError(
                f"{_name(row)}: the chat template renders the conversation before message {index} otherwise than "
                "inside the whole, so the answer cannot be told from the prompt. Mark it in the template with "
                "{% generation %}, or give `input_ids` with `loss_mask`."
            )
        # Else the template rewrites earlier turns (drops their thoughts): the model never generates them like this.
    cuts.append((len(whole), False))

    ids: list[int] = []
    mask: list[bool] = []
    for piece, (_, learned) in zip(_tokenize_spans(whole, [end for end, _ in cuts], tokenizer), cuts, strict=True):
        # What a template puts behind the end-of-turn token (a line break, say) is never generated.
        n_learned = _length_to_eos(piece, tokenizer.eos_token_id) if learned else 0
        ids += piece
        mask += [True] * n_learned + [False] * (len(piece) - n_learned)
    return np.array(ids, np.int64), np.array(mask, np.bool_)


def _tokenize_spans(text: str, ends: Sequence[int], tokenizer: Any) -> list[list[int]]:
    """The token ids of the spans of ``text`` that end at ``ends``.

    Cut from the tokens of the whole text where its boundaries allow; else each span is tokenised apart.
    """
    whole = tokenizer.encode(text, add_special_tokens=False)
    pieces: list[list[int]] = []
    start, position = 0, 0
    for end in ends:
        prefix = tokenizer.encode(text[:end], add_special_tokens=False)
        if whole[: len(prefix)] != prefix:
            break
        pieces.append(whole[start : len(prefix)])
        start = len(prefix)
    else:
        return pieces
    pieces = []
    for end in ends:
        pieces.append(tokenizer.encode(text[position:end], add_special_tokens=False) if end > position else [])
        position = end
    return pieces


def _shared_prefix(a: str, b: str) -> int:
    """Characters that two texts begin with alike."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _length_to_eos(piece: Sequence[int], eos_token_id: int | None) -> int:
    """Tokens up to the last end-of-sequence token, or all of them if there is none."""
    for length in range(len(piece), 0, -1):
        if piece[length - 1] == eos_token_id:
            return length
    return len(piece)


def _columns(row: Mapping[str, Any]) -> list[str]:
    return [name for name in row if not name.startswith("_")]


def _name(row: Mapping[str, Any]) -> str:
    return f"row {row['_index']} of the dataset" if "_index" in row else "a row of the dataset"
