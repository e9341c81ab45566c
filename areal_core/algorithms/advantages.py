"""Advantages on packed tokens: from rewards to one number per trained token.

An *action* is a trained token. Tokens between two turns of a conversation are part of the environment: they take no
step in time and are neither discounted nor given an advantage.
"""

from __future__ import annotations

import torch

from areal_core.algorithms.segments import (
    expand_rows,
    last_masked,
    next_masked,
    reverse_scan,
    segment_sum,
    sequence_index,
)


def broadcast_advantages(advantages: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Give every trained token the advantage of its sequence (outcome supervision, arXiv:2402.03300, section 4.1.2).

    Args:
        advantages: ``[B]``.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.

    Returns:
        ``[T]``, 0 where not ``loss_mask``.
    """
    return torch.where(loss_mask, expand_rows(advantages, cu_seqlens, len(loss_mask)), 0.0)


def action_rewards(
    rewards: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    token_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rewards of single actions: the sequence's reward at its last trained token, plus token rewards.

    A token reward at a token that is not trained (say, at the end of an environment's answer) belongs to the last
    trained token before it; one before the first trained token follows no action and is dropped.

    Args:
        rewards: ``[B]``.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        token_rewards: ``[T]`` or None.

    Returns:
        ``[T]``, 0 where not ``loss_mask``. A sequence without trained tokens has no place for its reward.
    """
    index = sequence_index(cu_seqlens, len(loss_mask))
    is_last = loss_mask & (next_masked(loss_mask, index) < 0)
    result = torch.where(is_last, expand_rows(rewards, cu_seqlens, len(loss_mask)), 0.0)
    if token_rewards is not None:
        at = last_masked(loss_mask, index)
        moved = torch.where(at >= 0, token_rewards.to(result.dtype), 0.0)
        result = result + segment_sum(moved, at.clamp(min=0), len(moved))
    return result


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the actions of each sequence.

    ``delta_t = r_t + discount * V_{t'} - V_t`` and ``A_t = delta_t + discount * gae_lambda * A_{t'}``, where ``t'``
    is the next action; after the last action ``V`` and ``A`` are 0 (truncated completions too). Returns are
    ``A_t + V_t``.

    Args:
        rewards: ``[T]``, per action; see ``action_rewards``.
        values: ``[T]``: value of the state before each token; not read where not ``loss_mask``.
        loss_mask: bool ``[T]``.
        cu_seqlens: int ``[B + 1]``.
        discount, gae_lambda: in [0, 1].

    Returns:
        advantages and returns, each ``[T]`` in the type of ``rewards``, 0 where not ``loss_mask``; computed in fp64.
    """
    index = sequence_index(cu_seqlens, len(loss_mask))
    after = next_masked(loss_mask, index)
    value = torch.where(loss_mask, values.double(), 0.0)
    next_value = torch.where(after >= 0, value[after.clamp(min=0)], 0.0) if len(value) else value
    delta = torch.where(loss_mask, rewards.double() + discount * next_value - value, 0.0)
    # Tokens between turns hand the sum on unchanged; nothing comes after the last action.
    decay = torch.full_like(delta, discount * gae_lambda).masked_fill(~loss_mask, 1.0).masked_fill(after < 0, 0.0)
    advantages = torch.where(loss_mask, reverse_scan(delta, decay), 0.0)
    return advantages.to(rewards.dtype), (advantages + value).to(rewards.dtype)


def rewards_to_go(
    rewards: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, discount: float
) -> torch.Tensor:
    """``G_t = r_t + discount * G_{t'}``: GAE without values and with lambda 1. Arguments and result as in ``gae``."""
    return gae(rewards, torch.zeros_like(rewards), loss_mask, cu_seqlens, discount, 1.0)[0]
