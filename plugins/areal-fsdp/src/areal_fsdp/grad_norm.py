"""The norm of a gradient that is spread over a mesh, every element counted once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from areal_fsdp import comm
from areal_fsdp.mesh import Mesh


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _copies(gradient: torch.Tensor, world_size: int) -> int:
    """How many ranks hold each element."""
    if not isinstance(gradient, DTensor):
        return world_size
    if any(placement.is_partial() for placement in gradient.placements):
        raise RuntimeError("a gradient is not reduced yet: its norm over the mesh is not known")
    sharded = 1
    for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
        sharded *= 1 if placement.is_replicate() else size
    return world_size // sharded


@torch.no_grad()
def grad_norm(parameters: Sequence[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """L2 norm of all gradients, fp64, equal on every rank; not finite on every rank if it is so on one."""
    device = mesh.device
    world_size = dist.get_world_size(mesh.world) if mesh.world is not None else 1
    total = torch.zeros((), dtype=torch.float64, device=device)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        # In fp32: a norm of bf16 would be rounded to it.
        local = torch._foreach_norm([_local(g) for g in gradients], dtype=torch.float32)
        norms = torch.stack([n.to(device) for n in local])
        copies = torch.tensor([_copies(g, world_size) for g in gradients], dtype=torch.float64, device=device)
        total += (norms.double().square() / copies).sum()
    return comm.all_reduce(total, mesh.world).sqrt()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients down, in place, so that their norm is at most ``max_norm``; 0: never."""
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    if max_norm <= 0 or not gradients:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float().to(gradients[0].device)
    torch._foreach_mul_(gradients, factor)
