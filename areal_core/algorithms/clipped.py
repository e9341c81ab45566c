"""What the clipped policy-gradient algorithms have in common, from their configuration to the pure functions.

An algorithm composes these; it does not inherit them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from areal_core.algorithms.advantages import action_rewards, broadcast_advantages, rewards_to_go
from areal_core.algorithms.aggregate import sequence_weights, token_weights, trained_lengths
from areal_core.algorithms.importance import ImportanceWeight, importance_weight
from areal_core.algorithms.kl import kl_estimate
from areal_core.algorithms.losses import PolicyLoss, ppo_clip_loss, probability_ratio
from areal_core.algorithms.norm import has_variance, normalize
from areal_core.algorithms.proximal import loglinear_proximal
from areal_core.algorithms.segments import expand_rows
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput, as_maximum, as_stat
from areal_core.api.configs import NormConfig, PPOActorConfig

#: From current and old log-probs and advantages, all ``[T]`` and 0 where not trained, to a loss per token.
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PolicyLoss]


def shaped_rewards(config: PPOActorConfig, batch: PackedBatch) -> torch.Tensor:
    """``clip((r + bias) * scaling, +-reward_clip)``, then ``reward_norm``; fp32 ``[B]``."""
    scaled = (batch["rewards"] + config.reward_bias) * config.reward_scaling
    clipped = scaled.clamp(-config.reward_clip, config.reward_clip)
    return normalized(config.reward_norm, clipped, batch["group_ids"], None)


def shaped_action_rewards(config: PPOActorConfig, batch: PackedBatch, rewards: torch.Tensor) -> torch.Tensor:
    """Rewards ``[B]`` at each last trained token, plus scaled token rewards, minus ``kl_ctl * k1`` if the KL is in the
    reward; fp32 ``[T]``.
    """
    mask = batch["loss_mask"]
    token_rewards = batch.tokens.get("token_rewards")
    if token_rewards is not None:
        token_rewards = token_rewards * config.reward_scaling
    result = action_rewards(rewards, mask, batch.cu_seqlens, token_rewards)
    if config.kl_in_reward and config.kl_ctl > 0:
        policy = batch["prox_logprobs"] if "prox_logprobs" in batch else batch["logprobs"]
        kl = kl_estimate(policy, batch["ref_logprobs"], "k1")
        result = result - torch.where(mask, config.kl_ctl * kl, 0.0)
    return result


def outcome_advantages(config: PPOActorConfig, batch: PackedBatch, rewards: torch.Tensor) -> torch.Tensor:
    """Without a critic: shaped rewards ``[B]`` for every trained token, then ``adv_norm``; fp32 ``[T]``.

    With token rewards, ``discount < 1`` or the KL in the reward, the (discounted) sum of what comes after the token.
    """
    mask, cu_seqlens = batch["loss_mask"], batch.cu_seqlens
    dense_rewards = "token_rewards" in batch or config.kl_in_reward
    if dense_rewards or config.discount < 1:
        actions = shaped_action_rewards(config, batch, rewards)
        advantages = rewards_to_go(actions, mask, cu_seqlens, config.discount)
    else:
        advantages = broadcast_advantages(rewards, mask, cu_seqlens)
    return normalized_advantages(config, batch, advantages)


def normalized_advantages(config: PPOActorConfig, batch: PackedBatch, advantages: torch.Tensor) -> torch.Tensor:
    """``adv_norm`` over trained tokens; ``[T]``."""
    mask = batch["loss_mask"]
    groups = expand_rows(batch["group_ids"], batch.cu_seqlens, batch.num_tokens)
    return normalized(config.adv_norm, advantages, groups, mask)


def normalized(
    norm: NormConfig | None, values: torch.Tensor, group_ids: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """``normalize`` as a section of the configuration says; unchanged where there is none."""
    if norm is None:
        return values
    return normalize(
        values,
        group_ids,
        mask,
        mean_level=norm.mean_level,
        std_level=norm.std_level,
        mean_leave1out=norm.mean_leave1out,
        std_unbiased=norm.std_unbiased,
        eps=norm.eps,
    )


def advantage_stats(batch: PackedBatch) -> dict[str, float]:
    """Of a whole batch with ``advantages``: raw rewards per sequence, advantages per trained token, group variance."""
    if batch.num_seqs == 0:
        return {}
    rewards, group_ids, mask = batch["rewards"].double(), batch["group_ids"], batch["loss_mask"]
    mean = rewards.mean()
    # A group counts once, whatever its size: each sequence carries one over the size of its group.
    _, inverse, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    share = 1.0 / sizes[inverse].double()
    constant = (~has_variance(batch["rewards"], group_ids)).double()
    advantages = torch.where(mask, batch["advantages"], 0.0).double()
    trained = mask.sum().clamp(min=1)
    lengths = trained_lengths(mask, batch.cu_seqlens).double()
    values = {
        "reward/mean": mean,
        "reward/std": (rewards - mean).square().mean().sqrt(),
        "reward/max": rewards.max(),
        "reward/min": rewards.min(),
        "group_zero_variance": (constant * share).sum() / share.sum(),
        "advantage/mean": advantages.sum() / trained,
        "advantage/abs_mean": advantages.abs().sum() / trained,
        "advantage/max": torch.where(mask, batch["advantages"], -torch.inf).max().double(),
        "advantage/min": torch.where(mask, batch["advantages"], torch.inf).min().double(),
        "completion_length/mean": lengths.mean(),
        "completion_length/max": lengths.max(),
    }
    numbers = torch.stack(list(values.values())).nan_to_num(posinf=0.0, neginf=0.0).tolist()
    return dict(zip(values, numbers, strict=True))


def clipped_policy_loss(config: PPOActorConfig, output: TokenOutput, batch: PackedBatch) -> LossOutput:
    """``policy_loss`` with PPO's clip."""
    clip = functools.partial(
        ppo_clip_loss, eps_clip=config.eps_clip, eps_clip_higher=config.eps_clip_higher, c_clip=config.c_clip
    )
    return policy_loss(config, output, batch, clip)


def policy_loss(config: PPOActorConfig, output: TokenOutput, batch: PackedBatch, token_loss: TokenLoss) -> LossOutput:
    """``token_loss``, weighted by ``behaviour_weights``, plus KL to the reference, minus entropy bonus, aggregated by
    ``loss_agg`` into a sum.

    Reads ``logprobs``, ``advantages`` and ``loss_mask``; with the decoupled loss what ``proximal_logprobs`` reads, with
    a KL in the loss ``ref_logprobs``.
    """
    mask = batch["loss_mask"]

    def trained(values: torch.Tensor) -> torch.Tensor:
        # Masked before any arithmetic: an inf at a token that is not trained would turn into a NaN gradient.
        return torch.where(mask, values, 0.0)

    advantages, logprobs, behave = trained(batch["advantages"]), trained(output.logprobs), trained(batch["logprobs"])
    current = logprobs.detach()
    weight = token_weights(mask, batch.cu_seqlens, config.loss_agg, config.loss_agg_const)
    decoupled = config.is_decoupled
    old = trained(proximal_logprobs(config, batch, current, behave)) if decoupled else behave
    ref = trained(batch["ref_logprobs"]) if "ref_logprobs" in batch else None

    policy = token_loss(logprobs, old, advantages)
    per_token = policy.loss
    low, high = policy.clipped & (policy.ratio < 1), policy.clipped & (policy.ratio > 1)
    stats = {
        "ratio": as_stat(policy.ratio, mask),
        "clip_fraction": as_stat(policy.clipped.float(), mask),
        "clip_fraction_low": as_stat(low.float(), mask),
        "clip_fraction_high": as_stat(high.float(), mask),
        "advantage": as_stat(advantages, mask),
        "approx_kl": as_stat(_approx_kl(current, behave), mask),
    }
    maxima = {"ratio": as_maximum(policy.ratio, mask)}
    if config.c_clip is not None:
        stats["dual_clip_fraction"] = as_stat(policy.dual_clipped.float(), mask)
    if decoupled:
        importance = behaviour_weights(config, old, behave, mask, batch.cu_seqlens)
        per_token = per_token * importance.weight
        outside = as_stat(importance.outside.float(), mask)
        clamps = config.importance is not None and config.importance.mode == "clamp"
        stats["behave_ratio"] = as_stat(importance.ratio, mask)
        stats["behave_weight"] = as_stat(importance.weight, mask)
        stats["behave_clamped_fraction" if clamps else "behave_dropped_fraction"] = outside
        stats["prox_kl"] = as_stat(_approx_kl(current, old), mask)
        maxima["behave_ratio"] = as_maximum(importance.ratio, mask)
    stats["policy_loss"] = as_stat(per_token, mask)
    if config.kl_in_loss:
        if ref is None:
            raise ValueError("kl_ctl > 0 needs ref_logprobs in the batch")
        per_token = per_token + config.kl_ctl * kl_estimate(logprobs, ref, config.kl_estimator)
    if ref is not None:
        stats["ref_kl"] = as_stat(kl_estimate(current, ref, "k3"), mask)
    entropy = None if output.entropy is None else trained(output.entropy)
    if entropy is not None:
        stats["entropy"] = as_stat(entropy, mask)
    if config.entropy_coef > 0:
        if entropy is None:
            raise ValueError("entropy_coef > 0 needs output.entropy: run the engine with_entropy")
        per_token = per_token - config.entropy_coef * entropy
    return LossOutput((weight * per_token).sum(), stats, maxima)


def proximal_logprobs(
    config: PPOActorConfig, batch: PackedBatch, current: torch.Tensor, behave: torch.Tensor
) -> torch.Tensor:
    """Log-probs of the policy before the step's first update, ``[T]``, as ``prox_logp`` says how.

    Reads ``prox_logprobs`` (recompute), or ``versions`` and the row ``trainer_version`` (loglinear).

    Args:
        current, behave: ``[T]``, of the current policy, detached, and of the sampler.
    """
    if config.prox_logp == "recompute":
        return batch["prox_logprobs"]
    if config.prox_logp == "rollout":
        return behave
    version = expand_rows(batch["trainer_version"], batch.cu_seqlens, batch.num_tokens)
    return loglinear_proximal(current, behave, batch["versions"], version)


def behaviour_weights(
    config: PPOActorConfig, prox: torch.Tensor, behave: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> ImportanceWeight:
    """The proximal policy's weight over the sampler's, bounded by ``importance`` or ``behave_imp_weight_cap``.

    The decoupled objective (AReaL, arXiv:2505.24298, eq. 5; Hilton et al., arXiv:2110.00641, eq. 4) is
    ``prox / behave * min(r A, clip(r) A)`` with ``r = current / prox``.
    """
    chosen = config.importance
    if chosen is None:
        return importance_weight(prox, behave, mask, cu_seqlens, mode="mask", upper=config.behave_imp_weight_cap)
    return importance_weight(
        prox,
        behave,
        mask,
        cu_seqlens,
        level=chosen.level,
        mode=chosen.mode,
        lower=chosen.lower,
        upper=chosen.upper,
        sequence_ratio=chosen.sequence_ratio,
    )


def row_weights(config: PPOActorConfig, batch: PackedBatch) -> torch.Tensor:
    """The sequences' weights in the denominator that goes with ``policy_loss``; fp32 ``[B]``."""
    return sequence_weights(batch["loss_mask"], batch.cu_seqlens, config.loss_agg)


def _approx_kl(logprobs: torch.Tensor, behave: torch.Tensor) -> torch.Tensor:
    """KL(behaviour || policy) per token, by k3 on the behaviour's samples."""
    return probability_ratio(logprobs, behave) - 1 - (logprobs - behave)
