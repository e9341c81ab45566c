"""Weights on their way to another process: one anonymous segment of shared memory, written here, copied there.

The segment has no name: it is inherited as a file descriptor. The kernel frees it with the last process that has it
open, however that process ends, so nothing can be left behind.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

_ALIGNMENT = 64


def create_segment() -> int:
    """An open descriptor of an empty segment; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("areal-weights")
    # Elsewhere: a file that is unlinked at once.
    with tempfile.TemporaryFile(prefix="areal-weights-") as file:
        return os.dup(file.fileno())


class SharedWeights:
    """Tensors of given shapes and types in a segment.

    Both sides compute the same layout; the writer calls ``allocate`` before the other opens it.

    Args:
        descriptor: of the segment; not closed here.
        shapes, dtypes: of each tensor; types by torch's names, e.g. ``bfloat16``.
    """

    def __init__(self, descriptor: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> None:
        self.descriptor, self.shapes = descriptor, shapes
        self.dtypes: list[torch.dtype] = [getattr(torch, name) for name in dtypes]
        self.offsets: list[int] = []
        size = 0
        for shape, dtype in zip(shapes, self.dtypes, strict=True):
            self.offsets.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.size = max(size, _ALIGNMENT)
        self._tensors: list[torch.Tensor] | None = None

    def allocate(self) -> None:
        if os.fstat(self.descriptor).st_size < self.size:
            os.ftruncate(self.descriptor, self.size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Views of the segment, which is mapped on first use."""
        if self._tensors is None:
            memory = mmap.mmap(self.descriptor, self.size)
            self._tensors = [
                torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(tuple(shape))
                if math.prod(shape)
                else torch.empty(tuple(shape), dtype=dtype)
                for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
            ]
        return self._tensors
