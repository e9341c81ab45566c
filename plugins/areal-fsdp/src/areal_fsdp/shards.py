"""A rank's part of a tensor that is sharded over a mesh, without communication."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The slice of ``whole`` (equal on every rank) that this rank holds of ``like``; all of it if that is no DTensor.

    Works for every placement that FSDP and tensor parallelism make of parameters, on one dimension together too.
    """
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = whole
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        part = part.narrow(dim, min(start, whole.shape[dim]) if size == 0 else start, size)
    return part
