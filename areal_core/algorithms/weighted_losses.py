"""Losses per token without PPO's hard clip: a weight times the log-prob, or a gate on the ratio.

Like ``losses``: minimised, neither masked nor summed here. Where a loss clips nothing, ``clipped`` is false.
"""

from __future__ import annotations

import torch

from areal_core.algorithms.losses import PolicyLoss, probability_ratio


def reinforce_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> PolicyLoss:
    """``-A log p`` (Williams 1992): the policy gradient where the samples are the policy's own.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, only for the reported ratio.
        advantages: ``[T]``.
    """
    ratio = probability_ratio(logprobs, old_logprobs).detach()
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantages * logprobs, ratio, nothing, nothing)


def surrogate_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> PolicyLoss:
    """``-r A`` with ``r = exp(logprobs - old_logprobs)``, without a clip: what PPO (arXiv:1707.06347, eq. 6) clips.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, of the policy the ratio is taken to.
        advantages: ``[T]``.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-advantages * ratio, ratio.detach(), nothing, nothing)


def cispo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    min_weight: float,
    max_weight: float,
) -> PolicyLoss:
    """Clipped importance weight times log-prob (CISPO; MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    ``-sg(clip(r, min_weight, max_weight)) A log p`` with ``r = exp(logprobs - old_logprobs)`` and ``sg`` the stop of
    the gradient. Unlike under PPO's clip every token keeps a gradient.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, of the policy the ratio is taken to.
        advantages: ``[T]``.
        min_weight, max_weight: bounds of the weight; the paper's ``1 - eps_low`` and ``1 + eps_high``.

    Returns:
        ``clipped`` is where the weight is not the ratio; those tokens have a gradient too.
    """
    ratio = probability_ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(min_weight, max_weight)
    return PolicyLoss(
        -weight * advantages * logprobs, ratio, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool)
    )


def sapo_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, tau_pos: float, tau_neg: float
) -> PolicyLoss:
    """Soft gate on the ratio instead of a clip (SAPO, arXiv:2511.20347).

    ``-A (4 / tau) sigmoid(tau (r - 1))`` with ``r = exp(logprobs - old_logprobs)``, and ``tau`` is ``tau_pos`` where
    ``A > 0``, else ``tau_neg``. The gradient is ``-A r grad log p`` times ``4 p (1 - p)``, ``p`` the sigmoid: 1 on
    policy, and less the further the ratio is from 1, on both sides.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, of the policy the ratio is taken to.
        advantages: ``[T]``.
        tau_pos, tau_neg: temperatures, above 0; a higher one lets less through.
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(loss, ratio.detach(), nothing, nothing)
