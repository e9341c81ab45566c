"""Losses whose ratio belongs to a whole sequence. Minimised, neither masked nor summed here."""

from __future__ import annotations

import torch

from areal_core.algorithms.aggregate import trained_lengths
from areal_core.algorithms.losses import PolicyLoss, ppo_clip_loss
from areal_core.algorithms.segments import expand_rows, segment_sum, sequence_index


def sequence_log_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    mean: bool = True,
) -> torch.Tensor:
    """Mean of ``logprobs - old_logprobs`` over each sequence's trained tokens (GSPO, arXiv:2507.18071, eq. 7).

    Its ``exp`` is the geometric mean of the token ratios.

    Args:
        logprobs, old_logprobs: ``[T]``; not read where not ``loss_mask``.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        mean: false gives the sum, whose ``exp`` is the ratio of the sequences' probabilities.

    Returns:
        ``[B]``, 0 for a sequence that trains no token.
    """
    index = sequence_index(cu_seqlens, len(loss_mask))
    # Masked before the subtraction: inf - inf at a token that is not trained would be a NaN in the gradient.
    difference = torch.where(loss_mask, logprobs, 0.0) - torch.where(loss_mask, old_logprobs, 0.0)
    total = segment_sum(difference, index, len(cu_seqlens) - 1)
    if not mean:
        return total
    return total / trained_lengths(loss_mask, cu_seqlens).clamp(min=1)


def sequence_clip_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate of the sequence's ratio (GSPO, arXiv:2507.18071, eq. 5 to 7), repeated at each of its tokens.

    ``-min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_higher) A)`` with ``s = exp(sequence_log_ratio)``. A clipped
    sequence has no gradient at any token. Otherwise the gradient goes through ``s`` to every trained token alike:
    the mean of the sequence's token losses has the gradient ``-s A / n`` at each of its ``n`` tokens.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, of the policy the ratio is taken to.
        advantages: ``[T]``, equal within a sequence.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        eps_clip, eps_clip_higher, c_clip: as in ``ppo_clip_loss``.
    """
    log_ratio = sequence_log_ratio(logprobs, old_logprobs, loss_mask, cu_seqlens)
    per_token = expand_rows(log_ratio, cu_seqlens, len(loss_mask))
    return ppo_clip_loss(per_token, torch.zeros_like(per_token), advantages, eps_clip, eps_clip_higher, c_clip)
