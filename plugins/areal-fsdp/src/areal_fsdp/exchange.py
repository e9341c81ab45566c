"""Collectives inside the model, with the gradient that belongs to each.

*Partial* values on the ranks of a group add up to the value that is meant; *equal* ones are it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Renamed in torch 2.13, with the same arguments.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, partial: bool) -> torch.Tensor:
        ctx.group, ctx.partial = group, partial
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.partial:
            return _reduce_scatter(grads[0], ctx.group), None, None
        rows = len(grads[0]) // dist.get_world_size(ctx.group)
        start = dist.get_rank(ctx.group) * rows
        return grads[0][start : start + rows], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty((len(x) * dist.get_world_size(group), *x.shape[1:]))
    _gather_into(out, x, group=group)
    return out


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty((len(x) // dist.get_world_size(group), *x.shape[1:]))
    _reduce_into(out, x, group=group)
    return out


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x``, equal on all ranks, where each rank then computes a part; its partial gradients are added up."""
    return _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of partial ``x``, equal on all ranks; all ranks must then compute the same."""
    return _Reduce.apply(x, group)


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup, *, partial: bool) -> torch.Tensor:
    """``[N / ranks, ...] -> [N, ...]``: every rank's rows.

    Args:
        partial: the ranks go on with different parts of the computation, so that their gradients add up; else they
            all compute the same, and each takes its own rows of the gradient.
    """
    return _Gather.apply(x, group, partial)


def scatter_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[N, ...] -> [N / ranks, ...]``: this rank's rows of the sum of partial ``x``."""
    return _Scatter.apply(x, group)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[ranks, ...]``: entry ``r`` goes to rank ``r``, and the result's entry ``r`` comes from it."""
    return _AllToAll.apply(x, group)
