"""What algorithms without a critic have in common. A subclass sets ``name`` and ``presets``, and perhaps the loss.

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


class CriticFree(Algorithm):
    """Normalised rewards as advantages, and PPO's clipped surrogate.

    With token rewards, ``discount < 1`` or the KL in the reward, a token's advantage is the (discounted) sum of what
    comes after it.
    """

    #: As in ``algorithm.name``, for messages.
    name: ClassVar[str]

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        check_clipped(self.config, group_size=group_size, has_ref=has_ref)
        if self.config.gae_lambda < 1:
            raise ConfigError(
                f"is {self.config.gae_lambda}, but {self.name} has no critic: below 1 GAE needs values. "
                "Use 1, or algorithm.name: ppo with a `critic`.",
                key="actor.gae_lambda",
            )
        if has_critic:
            raise ConfigError(
                f"is set, but {self.name} uses no critic. Remove it, or use algorithm.name: ppo.", key="critic"
            )

    def _reject(self, unused: Mapping[str, tuple[Any, str]]) -> None:
        """Refuse options of the ``actor`` section that this algorithm's loss does not have.

        Args:
            unused: option -> its value when off, and what to do instead.
        """
        for key, (off, instead) in unused.items():
            value = getattr(self.config, key)
            if value != off:
                raise ConfigError(f"is {value}, but {self.name} {instead}", key=f"actor.{key}")

    @property
    def needs_entropy(self) -> bool:
        return self.config.entropy_coef > 0 or self.config.report_entropy

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.config.kl_ctl > 0

    @property
    def needs_prox_logprobs(self) -> bool:
        return self.config.recomputes_prox_logprobs

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        return not self.config.kl_in_loss and self.config.entropy_coef == 0

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """Add ``advantages`` fp32 ``[T]``.

        Args:
            batch: the whole batch of a step: ``rewards`` ``[B]``, ``group_ids`` ``[B]``, ``loss_mask`` ``[T]``;
                ``logprobs`` and ``ref_logprobs`` ``[T]`` if the KL is in the reward; ``token_rewards`` ``[T]`` if any.
        """
        from areal_core.algorithms import clipped

        rewards = clipped.shaped_rewards(self.config, batch)
        batch = batch.with_tokens(advantages=clipped.outcome_advantages(self.config, batch, rewards))
        return batch, clipped.advantage_stats(batch)

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import clipped_policy_loss

        return clipped_policy_loss(self.config, output, batch)

    def row_weights(self, batch: PackedBatch) -> torch.Tensor:
        from areal_core.algorithms.clipped import row_weights

        return row_weights(self.config, batch)
