"""The slotted KV cache: one slot per row, used again when its sequence has ended."""

from __future__ import annotations

import numpy as np
import torch

_CAPACITY_STEP = 64


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if like.device.type == "cpu" and like.dtype == torch.float32:
        # numpy asks for huge pages, torch does not: without them, reading keys waits for address translation.
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


class KVCache:
    """Keys and values of ``rows`` sequences: per layer two tensors ``[rows, kv_heads, capacity, head_dim]``.

    Layers appear when the model first stores into them. Memory is zeroed, because attention multiplies masked
    values by 0, and 0 times an uninitialised NaN is NaN.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.capacity = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.generation = 0
        """Grows whenever the storage is replaced."""

    def reserve(self, rows: int, capacity: int, max_rows: int) -> None:
        """Make room for ``rows`` sequences of ``capacity`` tokens; what is stored stays."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        if rows > self.rows:
            rows = min(max_rows, max(rows, 2 * self.rows))
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + self.capacity // 2)
        new_rows = max(rows, self.rows)
        new_capacity = -(-max(capacity, self.capacity) // _CAPACITY_STEP) * _CAPACITY_STEP
        for index, (keys, values) in self.layers.items():
            self.layers[index] = (
                self._grown(keys, new_rows, new_capacity),
                self._grown(values, new_rows, new_capacity),
            )
        self.rows, self.capacity = new_rows, new_capacity
        self.generation += 1

    @staticmethod
    def _grown(old: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
        new = _zeros((rows, old.shape[1], capacity, old.shape[3]), old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of one layer, made to fit ``keys`` and ``values`` ``[tokens, kv_heads, head_dim]``."""
        found = self.layers.get(index)
        if found is None:
            found = (self._empty(keys), self._empty(values))
            self.layers[index] = found
        return found

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return _zeros((self.rows, like.shape[1], self.capacity, like.shape[2]), like)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` onto rows ``targets`` (int64, no row in both)."""
        for keys, values in self.layers.values():
            keys[targets, :, :length] = keys[sources, :, :length]
            values[targets, :, :length] = values[sources, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self.rows = self.capacity = 0
        self.generation += 1
