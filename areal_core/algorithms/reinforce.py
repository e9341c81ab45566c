"""REINFORCE and its descendants: RLOO and REINFORCE++.

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput


class Reinforce(CriticFree):
    """``-A_t log p(x_t)``, summed over each sequence, mean over sequences (Williams 1992, section 3).

    ``A_t`` is the reward, or what is left of it after ``actor.reward_norm``: a mean over the ``batch`` or the
    ``group`` is a baseline. No ratio corrects for samples of an older policy, so one optimizer step per batch is
    allowed, and ``rollout.max_head_offpolicyness`` is best left at 0.
    """

    name = "reinforce"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm": None,
        "actor.loss_agg": "seq_sum_const",
        "actor.loss_agg_const": 1.0,
        "actor.gae_lambda": 1.0,
    }

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        self._reject(
            {
                "use_decoupled_loss": (False, "has no ratio. Set it to false, or use actor.importance."),
                "c_clip": (None, "clips nothing. Leave it out, or use algorithm.name: grpo."),
                "eps_clip_higher": (None, "clips nothing. Leave it out, or use algorithm.name: grpo."),
                "ppo_n_minibatches": (
                    1,
                    "has no ratio to correct for the first of several updates. Use 1, or algorithm.name: grpo.",
                ),
            }
        )

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import policy_loss
        from areal_core.algorithms.weighted_losses import reinforce_loss

        return policy_loss(self.config, output, batch, reinforce_loss)


class RLOO(Reinforce):
    """REINFORCE with ``A_i = r_i - mean(r of the other samples of the prompt)`` (arXiv:2402.14740, section 2.2).

    The whole completion is one action, so its log-probs are summed. The paper also subtracts the KL to the reference
    from the reward: ``actor.kl_in_reward: true`` and ``actor.kl_ctl``. Here the baseline is of the rewards alone, and
    a token answers for the KL from itself on: the same gradient in expectation.
    """

    name = "rloo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.mean_leave1out": True,
        "actor.reward_norm.std_level": None,
        "actor.loss_agg": "seq_sum_const",
        "actor.loss_agg_const": 1.0,
        "actor.gae_lambda": 1.0,
    }


class ReinforcePP(CriticFree):
    """REINFORCE++ (arXiv:2501.03262): advantages normalised over all trained tokens of the batch, and PPO's clip.

    ``A_t = (a_t - mean(a)) / (std(a) + eps)`` with ``a_t = r - kl_ctl * sum of the KL (k1) from t on``; the second
    term needs ``actor.kl_in_reward: true``, ``actor.kl_ctl`` and ``ref``. One sample per prompt is enough. The
    paper's variant with a baseline first subtracts the mean of the group:
    ``actor.reward_norm: {mean_level: group, std_level: null}``, with the KL as a loss (k2).
    """

    name = "reinforce_pp"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm": None,
        "actor.adv_norm": {"mean_level": "batch", "std_level": "batch"},
        "actor.gae_lambda": 1.0,
    }
