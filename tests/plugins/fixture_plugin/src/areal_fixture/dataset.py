"""The dataset `digits`."""

from __future__ import annotations

from typing import Any

from areal_core import BadInputError


def get_digits_dataset(
    path: str | None,
    split: str,
    *,
    kind: str,
    tokenizer: Any,
    max_length: int | None,
    size: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Questions for a digit (``rl``), with the answer as a message of its own (``sft``)."""
    if split not in ("train", "test"):
        raise BadInputError(f"digits: there is no split {split!r}. Splits: train, test.")
    if kind not in ("rl", "sft"):
        raise BadInputError(f"digits: there are no rows of kind {kind!r}. Kinds: rl, sft.")
    rows = []
    for index in range(size):
        digit = str((index + (split == "test")) % 10)
        messages = [{"role": "user", "content": f"What is {digit} + 0?"}]
        if kind == "sft":
            messages.append({"role": "assistant", "content": digit})
        rows.append({"messages": messages, "digit": digit})
    return rows
