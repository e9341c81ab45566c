"""GRPO: group-normalised rewards and a clipped ratio, without a critic (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree


class GRPO(CriticFree):
    """``A_i = (r_i - mean(r of the group)) / (std(r of the group) + eps)`` for every trained token of sample ``i``.

    The loss is PPO's clipped surrogate with these advantages, plus ``kl_ctl`` times the KL to the reference (eq. 3;
    k3 is eq. 4). Defaults follow common practice since: token mean, no KL. ``loss_agg: seq_mean`` is the paper's mean.
    """

    name = "grpo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.gae_lambda": 1.0,
    }
