"""The data loader: batches of rows in an order that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_core.errors import BadInputError

_PLACE = ("_uid", "_index")


class DataLoader:
    """Endless batches of rows over epochs, each epoch in its own order.

    The order of an epoch is a permutation from Philox keyed by (seed, epoch): any position can be reached without
    replaying what came before. A position is (epoch, rows of it already given).

    Args:
        dataset: anything with ``len()`` and integer indexing that gives dicts.
        batch_size: rows per batch.
        shuffle: permute each epoch; else rows come in the dataset's order.
        seed: of the permutation.
        key: the dataset's section in the configuration, for error messages.
        drop_last: leave out the rest of an epoch that fills no batch; else the last batch of an epoch is short.

    Raises:
        BadInputError: if the dataset is empty, or with ``drop_last`` smaller than one batch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 1,
        drop_last: bool = True,
        *,
        key: str = "",
    ) -> None:
        prefix = f"{key}." if key else ""
        if batch_size < 1:
            raise BadInputError(f"{prefix}batch_size must be >= 1, got {batch_size}")
        size = len(dataset)
        if size == 0:
            raise BadInputError(
                f"{key + ': ' if key else ''}the dataset is empty: no row is left to train on. Check its path and "
                "split, and whether max_length or limit drops every row."
            )
        if drop_last and size < batch_size:
            raise BadInputError(
                f"{prefix}batch_size is {batch_size}, but the dataset has only {size} rows: no batch can be filled. "
                f"Set it to at most {size}, or give more rows."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._size = size
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._size // self.batch_size if self.drop_last else -(-self._size // self.batch_size)

    @property
    def dataset_size(self) -> int:
        return self._size

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch + 1 if self._epoch_is_over() else self._epoch

    def next_batch(self) -> list[dict[str, Any]]:
        """The next rows, each a copy with ``_uid`` (``"{epoch}-{index}"``) and ``_index`` (into the dataset) added."""
        if self._epoch_is_over():
            self._epoch, self._position = self._epoch + 1, 0
        indices = self._permutation()[self._position : self._position + self.batch_size].tolist()
        batch = [self._row(index) for index in indices]
        # Only now: a row that cannot be read leaves the position where it was.
        self._position += len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""
        return {"epoch": self._epoch, "position": self._position, "seed": self.seed, "dataset_size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, with the seed of that run. The batch size may have changed.

        Raises:
            BadInputError: if the state is of a dataset with another number of rows, or is no valid position.
        """
        try:
            epoch, position, seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
            size = int(state.get("dataset_size", self._size))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"not a data loader's state: {dict(state)!r} ({error!r})") from error
        if size != self._size:
            raise BadInputError(
                f"the saved data position is of a dataset with {size} rows, but this one has {self._size}. "
                "Resume with the same dataset, or start a new run."
            )
        if epoch < 0 or not 0 <= position <= self._size:
            raise BadInputError(f"epoch {epoch}, position {position} is no place in a dataset of {self._size} rows")
        self._epoch, self._position, self.seed = epoch, position, seed
        self._order = None

    def save_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of a row that this loader gave: its place, whatever else is in it (images, say)."""
        return {name: row[name] for name in _PLACE}

    def load_row(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The row that ``save_row`` was given; a row that was saved whole is as it was.

        Raises:
            BadInputError: if the dataset has no such row.
        """
        if set(saved) != set(_PLACE):
            return dict(saved)
        index = int(saved["_index"])
        if not 0 <= index < self._size:
            raise BadInputError(
                f"the saved run was at row {index} of its dataset, but this one has {self._size}. Resume with the same."
            )
        return {**self._row(index), "_uid": saved["_uid"]}

    def _epoch_is_over(self) -> bool:
        left = self._size - self._position
        return left < (self.batch_size if self.drop_last else 1)

    def _permutation(self) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != self._epoch:
            if self.shuffle:
                # Philox takes a 128-bit key: one half for each number, so that no two (seed, epoch) pairs collide.
                key = np.array([self.seed, self._epoch], dtype=np.uint64)
                order = np.random.Generator(np.random.Philox(key=key)).permutation(self._size)
            else:
                order = np.arange(self._size)
            self._order = (self._epoch, order)
        return self._order[1]

    def _row(self, index: int) -> dict[str, Any]:
        row = self.dataset[index]
        if not isinstance(row, Mapping):
            raise BadInputError(f"row {index} of the dataset is a {type(row).__name__}; a dict of columns is needed")
        return {**row, "_uid": f"{self._epoch}-{index}", "_index": index}
