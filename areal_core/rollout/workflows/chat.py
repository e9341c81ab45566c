"""What the built-in workflows share: rows, chat templates, and the keyword arguments of a reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from areal_core.errors import BadInputError

Message = dict[str, Any]

_ARGUMENTS = frozenset(("prompt", "completions", "prompt_ids", "completion_ids", "self"))


def reward_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that a reward gets: not the loader's own (``_uid``), nor its other arguments' names."""
    return {key: value for key, value in row.items() if not key.startswith("_") and key not in _ARGUMENTS}


def check_tokenizer(tokenizer: Any, workflow: str) -> None:
    if tokenizer is None:
        raise BadInputError(f"workflow {workflow!r} needs a tokenizer; set tokenizer_path or actor.path.")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInputError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; workflow {workflow!r} "
            "needs one to turn `messages` into tokens. Use an instruction-tuned model's tokenizer, or add a "
            "chat_template.jinja to its folder and set tokenizer_path."
        )


def messages_of(row: Mapping[str, Any]) -> Sequence[Message]:
    """The chat of a row.

    Raises:
        BadInputError: naming the row and what it has, if it has no chat.
    """
    messages = row.get("messages")
    where = f"dataset row {row.get('_uid', '?')}"
    if messages is None:
        columns = ", ".join(sorted(key for key in row if not key.startswith("_"))) or "none"
        raise BadInputError(
            f"{where} has no column 'messages' (its columns: {columns}). A dataset for RL gives a list of "
            "{'role': ..., 'content': ...} that ends with the user."
        )
    is_chat = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not is_chat or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise BadInputError(
            f"{where}: 'messages' is {str(messages)[:80]!r}. It must be a non-empty list of "
            "{'role': ..., 'content': ...}."
        )
    return messages


def first_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], tools: Sequence[Any] | None = None
) -> list[int]:
    """Token ids of the chat with a generation prompt."""
    keywords = {"tools": list(tools)} if tools else {}
    with template_errors(row):
        # Since transformers 5 the default of return_dict gives a BatchEncoding.
        return list(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **keywords)
        )


@contextmanager
def template_errors(row: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what a chat template raises becomes a BadInputError that names the row."""
    try:
        yield
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(
            f"the chat template cannot render dataset row {row.get('_uid', '?')}: {type(error).__name__}: {error}"
        ) from error


def check_length(prompt_ids: Sequence[int], max_tokens: int | None, row: Mapping[str, Any]) -> None:
    if max_tokens is not None and len(prompt_ids) >= max_tokens:
        raise BadInputError(
            f"the prompt of dataset row {row.get('_uid', '?')} has {len(prompt_ids)} tokens; with gconfig.max_tokens "
            f"{max_tokens} nothing is left to generate. Raise it, or drop long rows with train_dataset.max_length."
        )
