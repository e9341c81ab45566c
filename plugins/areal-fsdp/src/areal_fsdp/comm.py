"""Small collectives of the engine. All do nothing but return their input without a group. JSON, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from areal_core.errors import ArealError, BadInputError


def all_reduce(value: torch.Tensor, group: dist.ProcessGroup | None, op: Any = None) -> torch.Tensor:
    """Sum (or ``op``) in place over the group; returns ``value``."""
    if group is not None:
        dist.all_reduce(value, op=op if op is not None else dist.ReduceOp.SUM, group=group)
    return value


def max_int(value: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    if group is None:
        return value
    return int(all_reduce(torch.tensor(value, device=device), group, dist.ReduceOp.MAX).item())


def gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank."""
    if group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = torch.cat(sizes).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(part[:length].cpu().numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]


def raise_together(error: BaseException | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise on every rank if any rank has an error: its own, or one that quotes the first other rank's.

    Bad input is bad input on every rank, so that all end with the same exit code.
    """
    is_bad_input = isinstance(error, BadInputError)
    mine = None if error is None else [is_bad_input, str(error) if is_bad_input else f"{type(error).__name__}: {error}"]
    found = gather_json(mine, group, device)
    if error is not None:
        raise error
    for rank, failure in enumerate(found):
        if failure is not None:
            raise (BadInputError if failure[0] else ArealError)(f"rank {rank} failed: {failure[1]}")
