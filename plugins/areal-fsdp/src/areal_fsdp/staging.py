"""A copy of a training state in shared memory, for a process that writes it to disk."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from areal_fsdp.low_precision import local

_ALIGNMENT = 64


class SharedCopy:
    """Copies of this rank's parts of some tensors, one after the other in a segment without a name.

    The kernel frees the segment with the last process that has it open or mapped, so nothing can be left behind.

    Attributes:
        tensors: the copies under the names of the originals, sharded as those are.
        descriptor: of the segment; ``close()`` closes it, when the other process has it.
        size: of the segment, in bytes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        parts = {name: local(value) for name, value in tensors.items()}
        offsets: dict[str, int] = {}
        end = 0
        for name, part in parts.items():
            offsets[name] = end
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.size = max(end, _ALIGNMENT)
        self.descriptor = _create_segment(self.size)
        # However this object ends, also before anyone could take the segment.
        self.close = weakref.finalize(self, os.close, self.descriptor)
        memory = mmap.mmap(self.descriptor, self.size)
        self._start = tensor_at(memory, 0, torch.uint8, (1,)).data_ptr()
        self.tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, value in tensors.items():
                copy = tensor_at(memory, offsets[name], parts[name].dtype, parts[name].shape)
                copy.copy_(parts[name])
                is_sharded = isinstance(value, DTensor)
                self.tensors[name] = DTensor(copy, value._spec, requires_grad=False) if is_sharded else copy

    def offset(self, copy: torch.Tensor) -> int:
        """Where in the segment the bytes of a copy's local part are."""
        return copy.data_ptr() - self._start if copy.numel() else 0


def tensor_at(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The contiguous tensor of that type and shape whose bytes begin at ``offset``: memory of its own for torch."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _create_segment(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("areal-checkpoint")
    else:
        # Elsewhere: a file that is unlinked at once.
        with tempfile.TemporaryFile(prefix="areal-checkpoint-") as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
