"""Configurations that a clipped policy-gradient algorithm cannot work with. Imports nothing heavy."""

from __future__ import annotations

from areal_core.api.configs import NormConfig, PPOActorConfig
from areal_core.errors import ConfigError


def check_clipped(config: PPOActorConfig, *, group_size: int, has_ref: bool) -> None:
    """What holds with and without a critic.

    Raises:
        ConfigError: with the key and what would be right.
    """
    _check_groups(config, group_size)
    if config.kl_ctl > 0 and not has_ref:
        raise ConfigError(
            f"is missing, but actor.kl_ctl is {config.kl_ctl}: the KL needs a reference model. "
            "Add `ref: {path: ...}`, or set actor.kl_ctl to 0.",
            key="ref",
        )
    if config.kl_in_reward and config.kl_ctl == 0:
        raise ConfigError("is true, but actor.kl_ctl is 0. Set actor.kl_ctl > 0.", key="actor.kl_in_reward")
    if config.kl_ctl > 0 and not config.kl_in_reward and config.kl_estimator == "k1":
        raise ConfigError(
            "k1 has no expected gradient as a loss. Use k2 or k3, or actor.kl_in_reward: true.",
            key="actor.kl_estimator",
        )
    if config.loss_agg == "seq_sum_const" and config.loss_agg_const is None:
        raise ConfigError(
            "is missing: loss_agg seq_sum_const divides each sequence's sum by it. "
            "Dr.GRPO uses the generation budget: ${gconfig.max_new_tokens}.",
            key="actor.loss_agg_const",
        )
    _check_decoupled(config)


def _check_decoupled(config: PPOActorConfig) -> None:
    """The proximal policy, and the weight that corrects for the sampler."""
    importance, cap = config.importance, config.behave_imp_weight_cap
    if cap is not None and importance is not None:
        raise ConfigError(
            "and actor.importance bound the same weight. Leave it out: it is "
            f"`actor.importance: {{mode: mask, upper: {cap:g}}}`.",
            key="actor.behave_imp_weight_cap",
        )
    if cap is not None and not config.use_decoupled_loss:
        raise ConfigError(
            "caps a weight that only the decoupled loss has. Set actor.use_decoupled_loss: true, or leave it out.",
            key="actor.behave_imp_weight_cap",
        )
    if config.prox_logp != "recompute" and not config.is_decoupled:
        raise ConfigError(
            f"is {config.prox_logp}, but only the decoupled loss has a proximal policy. "
            "Set actor.use_decoupled_loss: true, or leave it out.",
            key="actor.prox_logp",
        )
    if config.prox_logp == "rollout" and (importance is not None or cap is not None):
        section = "behave_imp_weight_cap" if importance is None else "importance"
        raise ConfigError(
            f"is rollout: the sampler's own log-probs, so that the weight that actor.{section} bounds is always 1. "
            "Use recompute or loglinear.",
            key="actor.prox_logp",
        )
    if importance is None:
        return
    if importance.lower is not None and importance.upper is not None and importance.lower >= importance.upper:
        raise ConfigError(
            f"is {importance.lower}, not below actor.importance.upper ({importance.upper}). Common are 0.5 and 2; "
            "null is no bound.",
            key="actor.importance.lower",
        )
    if importance.level == "token" and importance.sequence_ratio != "geometric":
        raise ConfigError(
            f"is {importance.sequence_ratio}, but actor.importance.level is token. Set the level to sequence.",
            key="actor.importance.sequence_ratio",
        )


def _check_groups(config: PPOActorConfig, group_size: int) -> None:
    if group_size > 1:
        return
    norm = config.reward_norm
    reason = _needs_group(norm)
    if reason is not None:
        raise ConfigError(
            f"is {group_size}, but actor.reward_norm {reason}, so every advantage would be 0. "
            "Use at least 2 samples per prompt (8 is common), or actor.reward_norm levels `batch` or null.",
            key="gconfig.n_samples",
        )
    if config.adv_norm is not None and config.adv_norm.mean_leave1out and config.adv_norm.mean_level == "group":
        raise ConfigError(
            f"is {group_size}, but actor.adv_norm leaves the sample itself out of its group's mean. "
            "Use at least 2 samples per prompt.",
            key="gconfig.n_samples",
        )


def _needs_group(norm: NormConfig | None) -> str | None:
    if norm is None:
        return None
    if norm.std_level == "group":
        return "divides by the deviation of the group (std_level: group)"
    if norm.mean_level == "group":
        if norm.mean_leave1out:
            return "takes the mean of the other samples of the group (mean_leave1out: true)"
        return "subtracts the mean of the group (mean_level: group)"
    return None
