"""Normalisation of rewards and advantages over a batch or over the samples of each prompt."""

from __future__ import annotations

from typing import Literal

import torch

from areal_core.algorithms.segments import dense_groups, segment_sum

Level = Literal["batch", "group"]


def normalize(
    values: torch.Tensor,
    group_ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    mean_level: Level | None,
    std_level: Level | None,
    mean_leave1out: bool = False,
    std_unbiased: bool = True,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``(x - mean) / (std + eps)``, mean and deviation each over the batch, over x's group, or not at all.

    GRPO (arXiv:2402.03300, eq. 2): mean and std over the group. Dr.GRPO (arXiv:2503.20783): mean only. RLOO
    (arXiv:2402.14740, eq. 5): mean over the *other* members of the group, no std. LitePPO (arXiv:2508.08221): mean over
    the group, std over the batch.

    A level without variance says nothing about which sample is better: where all values of the deviation's level (or
    of the mean's, without deviation) are equal the result is exactly 0. That holds for a group of one too, with or
    without leave-one-out.

    Args:
        values: ``[N]``: one value per sequence, or per token.
        group_ids: int64 ``[N]``, needed for the level ``group``; any ids, in any order, groups of any size.
        mask: bool ``[N]``: what counts and is normalised; the rest becomes 0. None: all.
        mean_level, std_level: what they are taken over; None: not subtracted, not divided.
        mean_leave1out: leave the value itself out of its mean.
        std_unbiased: divide by ``n - 1`` in the variance, which is taken around the mean of its own level.
        eps: added to the deviation.

    Returns:
        ``[N]`` in the type of ``values``; computed in fp64.
    """
    if "group" in (mean_level, std_level) and group_ids is None:
        raise ValueError("normalising over groups needs group_ids")
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    x = values.double()
    everything = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    grouped = everything if group_ids is None else dense_groups(group_ids)
    result = x
    if mean_level is not None:
        at = grouped if mean_level == "group" else everything
        count, total, constant = _moments(x, mask, at)
        if mean_leave1out:
            centred = x - (total - x) / (count - 1).clamp(min=1)
        else:
            centred = x - total / count.clamp(min=1)
        # Rounding leaves about 1e-17 instead of 0 here; dividing by eps would make that visible.
        result = torch.where(constant, 0.0, centred)
    if std_level is not None:
        at = grouped if std_level == "group" else everything
        count, total, constant = _moments(x, mask, at)
        squares = torch.where(mask, (x - total / count.clamp(min=1)).square(), 0.0)
        degrees = (count - 1 if std_unbiased else count).clamp(min=1)
        std = (segment_sum(squares, at, len(x))[at] / degrees).sqrt()
        result = torch.where(constant, 0.0, result / (std + eps))
    return torch.where(mask, result, 0.0).to(values.dtype)


def has_variance(values: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Whether the values of each entry's group differ; ``[N]`` and int64 ``[N]`` to bool ``[N]``."""
    mask = torch.ones_like(values, dtype=torch.bool)
    return ~_moments(values, mask, dense_groups(group_ids))[2]


def _moments(x: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per entry: count and sum of its segment's masked values, and whether they are all equal."""
    size = len(x)
    count = segment_sum(mask.to(x.dtype), at, size)[at]
    total = segment_sum(torch.where(mask, x, 0.0), at, size)[at]
    highest = x.new_full((size,), -torch.inf).scatter_reduce(0, at, torch.where(mask, x, -torch.inf), "amax")[at]
    lowest = x.new_full((size,), torch.inf).scatter_reduce(0, at, torch.where(mask, x, torch.inf), "amin")[at]
    return count, total, highest <= lowest
