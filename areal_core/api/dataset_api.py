"""Datasets: rows that workflows and trainers understand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

DatasetKind = Literal["rl", "sft", "rw", "dpo"]


class DatasetFactory(Protocol):
    """Makes the rows of one split. A plugin registers a function of this shape.

    The result is anything with ``len()`` and integer indexing that gives dicts; a ``datasets.Dataset`` is.

    * ``rl``: ``messages`` (a chat that ends with the user) and whatever the reward needs, e.g. ``answer``. Every other
      column reaches the reward as a keyword argument.
    * ``sft``: ``messages`` that end with the assistant, or ``input_ids`` with a ``loss_mask`` of equal length.
    * ``rw``, ``dpo``: ``chosen`` and ``rejected``, both chats that end with the assistant; or both answers (text, or
      messages) to a ``prompt`` or ``messages`` (text, or a chat that ends with the user). A ``margin`` is optional.
    """

    def __call__(
        self,
        path: str | None,
        split: str,
        *,
        kind: DatasetKind,
        tokenizer: Any,
        max_length: int | None,
        **options: Any,
    ) -> Sequence[dict[str, Any]]:
        """Load one split.

        Args:
            path: hub id, folder or file, or None for the plugin's default.
            split: e.g. ``train`` or ``test``.
            kind: the form of the rows.
            tokenizer: for the length filter.
            max_length: rows whose tokens (prompt; prompt and answer for SFT) exceed this are dropped.
            options: the plugin's own, as its config class validated them.

        Raises:
            BadInputError: if a file or a column is missing. Names it, and the columns that exist.
        """
        ...
