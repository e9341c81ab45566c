"""Preference pairs: two answers to one prompt as token ids, laid side by side in a packed batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from areal_core.api.batch import PackedBatch
from areal_core.data.packing import pack_examples
from areal_core.data.sft import encode_example
from areal_core.errors import BadInputError

if TYPE_CHECKING:
    import torch

SIDES = ("chosen", "rejected")

_FORMS = (
    "`chosen` and `rejected` must be chats that end with the assistant; or answers (text, or messages) to a `prompt` "
    "or `messages` (text, or a chat that ends with the user)"
)

Example = Mapping[str, npt.NDArray[Any]]


def encode_pair(
    row: Mapping[str, Any], tokenizer: Any, max_length: int | None = None, *, target: Literal["answer", "score"]
) -> dict[str, Any] | None:
    """Both answers of one row as token ids, each with its prompt.

    Accepted rows: ``chosen`` and ``rejected`` are either whole chats (lists of messages that end with the assistant),
    or, beside a ``prompt`` (or ``messages``: text, or a chat that ends with the user), answers to it: text, or a list
    of messages that go on from the prompt. A whole chat that begins with the prompt may stand beside it too. ``tools``
    and ``margin`` (a number: how much better `chosen` is) are read if they are there.

    Only what follows the messages that both chats begin with is the answer. Its tokens end with the last end-of-turn
    token; what a chat template puts behind that is left out.

    Args:
        row: one row of a dataset of kind ``rw`` or ``dpo``.
        tokenizer: a transformers tokenizer.
        max_length: most tokens of either side; None: no bound.
        target: ``answer``: ``loss_mask`` marks the assistant's tokens of the answer. ``score``: one token more, a copy
            of the last, is the only one that it marks. The value of the state *before* that token is the score of the
            whole chat, so that any train engine with a scalar head gives it.

    Returns:
        ``chosen`` and ``rejected``, each with ``input_ids`` int64 ``[L]`` and ``loss_mask`` bool ``[L]``, and
        ``margin``, a float; None if a side is longer than ``max_length``, or the two are the same.

    Raises:
        BadInputError: naming the row and the column.
    """
    chats = {side: _chat(row, side) for side in SIDES}
    shared = _shared_messages(chats["chosen"], chats["rejected"])
    result: dict[str, Any] = {"margin": _margin(row)}
    for side, chat in chats.items():
        encoded = _encode_side(row, side, chat, tokenizer)
        if encoded is None:
            return None
        answers = sum(message["role"] == "assistant" for message in chat[shared:])
        ids, mask = _cut(encoded["input_ids"], encoded["loss_mask"], answers)
        if max_length is not None and len(ids) > max_length:
            return None
        if target == "score":
            ids, mask = np.append(ids, ids[-1:]), np.zeros(len(ids) + 1, np.bool_)
            mask[-1] = True
        result[side] = {"input_ids": ids, "loss_mask": mask}
    same = np.array_equal(result["chosen"]["input_ids"], result["rejected"]["input_ids"])
    return None if same else result


def pack_pairs(pairs: Sequence[Mapping[str, Any]]) -> PackedBatch:
    """Lay pairs end to end: sequence ``2 p`` is the chosen answer of pair ``p``, ``2 p + 1`` the rejected one.

    Returns:
        A batch with the tokens ``input_ids`` and ``loss_mask``, and the rows ``pair_ids`` and ``group_ids`` (int64,
        equal for the two sides: they stay in one micro-batch, and may share their prompt), ``prompt_lens`` (int32: the
        tokens that both sides begin with, none of them trained) and ``margins`` (fp32).
    """
    import torch

    sides: list[Example] = [pair[side] for pair in pairs for side in SIDES]
    batch = pack_examples(sides)
    ids = torch.arange(len(pairs)).repeat_interleave(2)
    prompts = torch.tensor([_shared_tokens(*(pair[side] for side in SIDES)) for pair in pairs], dtype=torch.int32)
    margins = torch.tensor([float(pair["margin"]) for pair in pairs])
    return batch.with_rows(
        pair_ids=ids,
        group_ids=ids.clone(),
        prompt_lens=prompts.repeat_interleave(2),
        margins=margins.repeat_interleave(2),
    )


def partition_pairs(batch: PackedBatch, k: int, *, attention_cost: float = 0.0) -> list[list[int]]:
    """``k`` parts of a batch of pairs with about equal cost (see ``balanced_partition``); no pair is split.

    Returns:
        ``k`` lists of sequence indices, ascending; some are empty with fewer pairs than parts.
    """
    from areal_core.data.partition import balanced_partition

    lengths = batch.seqlens.long()
    costs: torch.Tensor = lengths + attention_cost * lengths**2
    parts = balanced_partition(costs.view(-1, 2).sum(1).tolist(), k)
    return [[sequence for pair in part for sequence in (2 * pair, 2 * pair + 1)] for part in parts]


# ---------------------------------------------------------------------------------------------------------- rows


def _chat(row: Mapping[str, Any], side: str) -> list[Mapping[str, Any]]:
    """The whole chat of one side."""
    if side not in row:
        raise BadInputError(f"{_name(row)} has the columns {_columns(row)}, but no `{side}`: {_FORMS}.")
    answer = row[side]
    given = next((name for name in ("prompt", "messages") if row.get(name) is not None), None)
    if given is None:
        if isinstance(answer, str):
            raise BadInputError(
                f"{_name(row)}: `{side}` is text, so the row needs its `prompt` (or `messages`), which the columns "
                f"{_columns(row)} lack."
            )
        chat = _messages(row, side)
    else:
        prompt = _messages(row, given, role="user")
        if prompt[-1]["role"] == "assistant":
            raise BadInputError(f"{_name(row)}: `{given}` ends with the assistant; the answers go on from a user.")
        messages = _messages(row, side, role="assistant")
        whole = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
        if not whole and messages[0]["role"] in ("user", "system"):
            raise BadInputError(
                f"{_name(row)}: `{side}` is a chat of its own that does not begin with `{given}`. Leave one out."
            )
        chat = messages if whole else [*prompt, *messages]
    if chat[-1]["role"] != "assistant":
        raise BadInputError(f"{_name(row)}: `{side}` ends with role {chat[-1]['role']!r}; it must be the assistant.")
    return chat


def _messages(row: Mapping[str, Any], column: str, role: str | None = None) -> list[Mapping[str, Any]]:
    """A column as a list of messages; text is one of ``role``."""
    value = row[column]
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not is_list or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value):
        kind = "an empty list" if isinstance(value, Sequence) and len(value) == 0 else f"a {type(value).__name__}"
        raise BadInputError(
            f"{_name(row)}: `{column}` must be text or a list of dicts with `role` and `content`; it is {kind}."
        )
    return [dict(message) for message in value]


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInputError(f"{_name(row)}: `margin` must be a finite number, got {value!r}.")
    return float(value)


def _encode_side(
    row: Mapping[str, Any], side: str, chat: Sequence[Mapping[str, Any]], tokenizer: Any
) -> dict[str, npt.NDArray[Any]] | None:
    example = {"messages": list(chat), **{name: row[name] for name in ("tools", "_index") if name in row}}
    try:
        return encode_example(example, tokenizer)
    except BadInputError as error:
        raise BadInputError(str(error).replace("`messages`", f"`{side}`")) from error


# -------------------------------------------------------------------------------------------------------- tokens


def _shared_messages(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Messages that two chats begin with alike, at least the last of each left out."""
    limit = min(len(one), len(other)) - 1
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def _cut(
    ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], answers: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The tokens up to the last that the assistant says, and the mask of its last ``answers`` turns alone."""
    end = int(np.flatnonzero(mask)[-1]) + 1
    ids, mask = ids[:end], mask[:end].copy()
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    if len(starts) > answers:
        mask[: starts[-answers]] = False
    return ids, mask


def _shared_tokens(one: Example, other: Example) -> int:
    """Tokens before the first that differs or is trained."""
    length = min(len(one["input_ids"]), len(other["input_ids"]))
    stop = (one["input_ids"][:length] != other["input_ids"][:length]) | (
        one["loss_mask"][:length] | other["loss_mask"][:length]
    )
    return int(np.argmax(stop)) if stop.any() else length


def _columns(row: Mapping[str, Any]) -> list[str]:
    return [name for name in row if not name.startswith("_")]


def _name(row: Mapping[str, Any]) -> str:
    return f"row {row['_index']} of the dataset" if "_index" in row else "a row of the dataset"
