"""PPO with a critic: generalised advantage estimation and a clipped ratio (arXiv:1707.06347).

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


class PPO(Algorithm):
    """GAE (arXiv:1506.02438) over the critic's values, normalised over the batch, and the clipped surrogate (eq. 7).

    Rewards are not normalised: the critic learns their scale. The KL to a reference, if any, is best subtracted from
    the rewards (``actor.kl_in_reward: true``; InstructGPT, arXiv:2203.02155, eq. 2).
    """

    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm": None,
        "actor.adv_norm": {"mean_level": "batch", "std_level": "batch"},
        "actor.gae_lambda": 0.95,
    }

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        check_clipped(self.config, group_size=group_size, has_ref=has_ref)
        if not has_critic:
            raise ConfigError(
                "is missing: ppo estimates advantages with a value model. Add `critic: {path: ..., optimizer: ...}`, "
                "or use algorithm.name: grpo, which needs none.",
                key="critic",
            )

    @property
    def needs_entropy(self) -> bool:
        return self.config.entropy_coef > 0 or self.config.report_entropy

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.config.kl_ctl > 0

    @property
    def needs_values(self) -> bool:
        return True

    @property
    def needs_prox_logprobs(self) -> bool:
        return self.config.recomputes_prox_logprobs

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        return not self.config.kl_in_loss and self.config.entropy_coef == 0

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """Add ``advantages`` and ``returns``, fp32 ``[T]``.

        Args:
            batch: as for GRPO, with the critic's ``values`` ``[T]`` as well.
        """
        from areal_core.algorithms import clipped
        from areal_core.algorithms.advantages import gae

        config = self.config
        rewards = clipped.shaped_rewards(config, batch)
        actions = clipped.shaped_action_rewards(config, batch, rewards)
        advantages, returns = gae(
            actions, batch["values"], batch["loss_mask"], batch.cu_seqlens, config.discount, config.gae_lambda
        )
        batch = batch.with_tokens(advantages=clipped.normalized_advantages(config, batch, advantages), returns=returns)
        return batch, clipped.advantage_stats(batch)

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import clipped_policy_loss

        return clipped_policy_loss(self.config, output, batch)

    def row_weights(self, batch: PackedBatch) -> torch.Tensor:
        from areal_core.algorithms.clipped import row_weights

        return row_weights(self.config, batch)
