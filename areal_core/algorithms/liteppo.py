"""LitePPO: two tricks on plain PPO without a critic (arXiv:2508.08221)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree


class LitePPO(CriticFree):
    """``A_i = (r_i - mean(r of the group)) / (std(r of the batch) + eps)``, and the loss is the mean over tokens.

    A group's own deviation, which GRPO divides by, blows up where nearly all samples agree; that of the batch does not.
    The clip is PPO's, the same on both sides.
    """

    name = "liteppo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "batch",
        "actor.loss_agg": "token_mean",
        "actor.gae_lambda": 1.0,
    }
