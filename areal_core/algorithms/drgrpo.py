"""Dr.GRPO: GRPO without the two divisions that bias it (arXiv:2503.20783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree


class DrGRPO(CriticFree):
    """``A_i = r_i - mean(r of the group)``, and each sequence's summed loss over one constant (section 3.2).

    GRPO's division by the group's deviation favours questions that are nearly always or nearly never solved, and its
    division by the sequence's own length favours short right and long wrong answers. The constant is the generation
    budget, ``gconfig.max_new_tokens``; it scales the loss and nothing else. The clip is PPO's.
    """

    name = "drgrpo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": None,
        "actor.loss_agg": "seq_sum_const",
        "actor.loss_agg_const": "${gconfig.max_new_tokens}",
        "actor.gae_lambda": 1.0,
    }
