"""Several rewards per sequence, made into one advantage."""

from __future__ import annotations

import torch

from areal_core.algorithms.clipped import normalized
from areal_core.algorithms.norm import has_variance, normalize
from areal_core.api.configs import NormConfig


def decoupled_rewards(
    terms: torch.Tensor, weights: torch.Tensor | None, group_ids: torch.Tensor, norm: NormConfig
) -> torch.Tensor:
    """Each reward normalised for itself, their weighted sum normalised over the batch (GDPO, arXiv:2601.05242, 3.1).

    A group in which no reward varies has 0. (By the formula it has ``-mean(S) / std(S)``, and ``mean(S)`` is 0 up to
    rounding, or up to the groups in which some samples lack a reward.)

    Args:
        terms: ``[B, K]``; NaN where a sequence lacks a reward: it counts 0, and not in the means of the others.
        weights: ``[B, K]``; None: 1 each.
        group_ids: int64 ``[B]``.
        norm: of the single rewards; its ``eps`` and ``std_unbiased`` also of the sum.

    Returns:
        ``[B]`` in the type of ``terms``.
    """
    total = torch.zeros(len(terms), dtype=torch.float64, device=terms.device)
    varies = torch.zeros(len(terms), dtype=torch.bool, device=terms.device)
    for k in range(terms.shape[1]):
        present = ~terms[:, k].isnan()
        values = torch.where(present, terms[:, k], 0.0).double()
        advantage = normalized(norm, values, group_ids, present)
        total = total + (advantage if weights is None else weights[:, k].double() * advantage)
        varies |= has_variance(advantage, group_ids)
    whole = normalize(total, mean_level="batch", std_level="batch", std_unbiased=norm.std_unbiased, eps=norm.eps)
    return torch.where(varies, whole, 0.0).to(terms.dtype)
