"""GRPO: group-normalised rewards and a clipped ratio, without a critic (DeepSeekMath, arXiv:2402.03300).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.algorithms.checks import check_clipped
from areal_core.api.algorithm_api import Algorithm
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


class GRPO(Algorithm):
    """``A_i = (r_i - mean(r of the group)) / (std(r of the group) + eps)`` for every trained token of sample ``i``.

    The loss is PPO's clipped surrogate with these advantages, plus ``kl_ctl`` times the KL to the reference (eq. 3;
    k3 is eq. 4). Defaults follow common practice since: token mean, no KL. ``loss_agg: seq_mean`` is the paper's mean.
    With token rewards, ``discount < 1`` or the KL in the reward, a token's advantage is the (discounted) sum of what
    comes after it.
    """

    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.gae_lambda": 1.0,
    }

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        check_clipped(self.config, group_size=group_size, has_ref=has_ref)
        if self.config.gae_lambda < 1:
            raise ConfigError(
                f"is {self.config.gae_lambda}, but grpo has no critic: below 1 GAE needs values. "
                "Use 1, or algorithm.name: ppo with a `critic`.",
                key="actor.gae_lambda",
            )
        if has_critic:
            raise ConfigError("is set, but grpo uses no critic. Remove it, or use algorithm.name: ppo.", key="critic")

    @property
    def needs_entropy(self) -> bool:
        return self.config.entropy_coef > 0

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.config.kl_ctl > 0

    @property
    def needs_prox_logprobs(self) -> bool:
        return self.config.use_decoupled_loss

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        kl_in_loss = self.config.kl_ctl > 0 and not self.config.kl_in_reward
        return not kl_in_loss and self.config.entropy_coef == 0

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """Add ``advantages`` fp32 ``[T]``.

        Args:
            batch: the whole batch of a step: ``rewards`` ``[B]``, ``group_ids`` ``[B]``, ``loss_mask`` ``[T]``;
                ``logprobs`` and ``ref_logprobs`` ``[T]`` if the KL is in the reward; ``token_rewards`` ``[T]`` if any.
        """
        from areal_core.algorithms import clipped
        from areal_core.algorithms.advantages import broadcast_advantages, rewards_to_go

        config, mask, cu_seqlens = self.config, batch["loss_mask"], batch.cu_seqlens
        rewards = clipped.shaped_rewards(config, batch)
        dense_rewards = "token_rewards" in batch or config.kl_in_reward
        if dense_rewards or config.discount < 1:
            actions = clipped.shaped_action_rewards(config, batch, rewards)
            advantages = rewards_to_go(actions, mask, cu_seqlens, config.discount)
        else:
            advantages = broadcast_advantages(rewards, mask, cu_seqlens)
        batch = batch.with_tokens(advantages=clipped.normalized_advantages(config, batch, advantages))
        return batch, clipped.advantage_stats(batch)

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import clipped_policy_loss

        return clipped_policy_loss(self.config, output, batch)

    def row_weights(self, batch: PackedBatch) -> torch.Tensor:
        from areal_core.algorithms.clipped import row_weights

        return row_weights(self.config, batch)
