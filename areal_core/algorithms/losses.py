"""Losses per token, for the PPO family and its critic. All are minimised; none is masked or summed here."""

from __future__ import annotations

import attrs
import torch

from areal_core.algorithms.kl import MAX_LOG_RATIO
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput, as_stat
from areal_core.api.engine_api import LossFn


@attrs.frozen(eq=False)
class PolicyLoss:
    """A policy loss per token, and what a practitioner looks at.

    Attributes:
        loss: ``[T]``.
        ratio: ``[T]``: current over old probability, detached.
        clipped: bool ``[T]``: the clip is active, so the token has no gradient.
        dual_clipped: bool ``[T]``: the dual clip is active, likewise.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


def probability_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """``exp(logprobs - old_logprobs)`` with the log-ratio clamped to +-20 (no gradient beyond); all ``[T]``."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate (PPO, arXiv:1707.06347, eq. 7), with optional asymmetric and dual clip.

    ``-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A)`` with ``r = exp(logprobs - old_logprobs)``. The
    asymmetric range is DAPO's clip-higher (arXiv:2503.14476, eq. 10). The dual clip (arXiv:1912.09729, eq. 5) bounds
    the loss of a negative advantage from above: ``-max(min(...), c_clip A)`` where ``A < 0``.

    Args:
        logprobs: ``[T]``, of the current policy; gradients flow through it.
        old_logprobs: ``[T]``, of the policy the ratio is taken to.
        advantages: ``[T]``.
        eps_clip: range below 1, and above it unless ``eps_clip_higher``.
        eps_clip_higher: range above 1.
        c_clip: factor of the dual clip, above 1; None: no dual clip.
    """
    upper = eps_clip if eps_clip_higher is None else eps_clip_higher
    ratio = probability_ratio(logprobs, old_logprobs)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - eps_clip, 1 + upper)
    clipped = bounded > free
    loss = torch.where(clipped, bounded, free)
    dual_clipped = torch.zeros_like(clipped)
    if c_clip is not None:
        bound = -advantages * c_clip
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
    return PolicyLoss(loss, ratio.detach(), clipped.detach(), dual_clipped.detach())


def value_clip_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_eps_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped value loss of PPO (Schulman's implementation; arXiv:2006.05990, section 3.2).

    ``max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2``.

    Args:
        values: ``[T]``, of the current critic; gradients flow through it.
        old_values: ``[T]``, of the critic that the advantages came from.
        returns: ``[T]``.
        value_eps_clip: in units of the value.

    Returns:
        loss ``[T]``, and bool ``[T]``: the clip is active.
    """
    near = values.clamp(old_values - value_eps_clip, old_values + value_eps_clip)
    free, bounded = (values - returns).square(), (near - returns).square()
    clipped = bounded > free
    return 0.5 * torch.where(clipped, bounded, free), clipped.detach()


def critic_loss(value_eps_clip: float, coef: float) -> LossFn:
    """The loss of PPO's critic: the sum of ``coef * value_clip_loss`` over trained tokens.

    The batch needs ``values`` (before the step) and ``returns``. Its weight is the number of trained tokens.
    """

    def loss_fn(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        if output.values is None:
            raise ValueError("the critic's loss needs output.values; is the engine's role 'critic'?")
        mask, returns = batch["loss_mask"], batch["returns"]
        loss, clipped = value_clip_loss(output.values, batch["values"], returns, value_eps_clip)
        error = returns - output.values
        stats = {
            "value_loss": as_stat(loss, mask),
            "value_clip_fraction": as_stat(clipped.float(), mask),
            "value": as_stat(output.values, mask),
            "return": as_stat(returns, mask),
            "value_error": as_stat(error.abs(), mask),
        }
        return LossOutput(coef * torch.where(mask, loss, 0.0).sum(), stats)

    return loss_fn
