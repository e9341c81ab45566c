"""GDPO: several rewards, each normalised for itself before they are added (arXiv:2601.05242).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import PackedBatch
from areal_core.errors import ConfigError


class GDPO(CriticFree):
    """``A_i = (S_i - mean(S)) / (std(S) + eps)`` over the batch, with ``S_i = sum_k weight_k * A_ik`` and
    ``A_ik = (r_ik - mean(r_k of the group)) / (std(r_k of the group) + eps)`` (section 3.1).

    GRPO normalises the sum of the rewards, so that different combinations of rewards with equal sums have equal
    advantages, and the reward that varies most decides. The weights are ``rewards.LABEL.weight``. A reward that a
    sample lacks counts 0 for it. The loss is GRPO's.
    """

    name = "gdpo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.gae_lambda": 1.0,
    }

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        if self.config.reward_norm is None:
            raise ConfigError(
                "is null, but gdpo normalises each reward by it. Use `{mean_level: group, std_level: group}`.",
                key="actor.reward_norm",
            )
        single = "normalises each of several rewards. Leave it out, and set rewards.LABEL.weight."
        self._reject({"reward_bias": (0.0, single), "reward_scaling": (1.0, single)})

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """As for GRPO, with the rows ``reward_terms`` fp32 ``[B, K]`` (NaN: lacking) and ``reward_weights`` ``[B, K]``.

        Without them ``rewards`` is the only reward.
        """
        from areal_core.algorithms import clipped
        from areal_core.algorithms.multi_reward import decoupled_rewards

        norm = self.config.reward_norm
        if norm is None:
            raise ValueError("gdpo needs actor.reward_norm")
        terms = batch.rows.get("reward_terms")
        terms = batch["rewards"][:, None] if terms is None else terms
        clip = self.config.reward_clip
        rewards = decoupled_rewards(
            terms.clamp(-clip, clip), batch.rows.get("reward_weights"), batch["group_ids"], norm
        ).to(batch["rewards"].dtype)
        batch = batch.with_tokens(advantages=clipped.outcome_advantages(self.config, batch, rewards))
        return batch, clipped.advantage_stats(batch)
