"""M2PO: no clip, but a bound on the second moment of the log-ratio, for stale samples (arXiv:2510.01161).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import PPOActorConfig
from areal_core.config.fields import option
from areal_core.errors import ConfigError


@attrs.define(kw_only=True)
class M2POConfig:
    """Options of the algorithm `m2po`."""

    threshold: float = option(0.04, "Bound on the mean squared log-ratio of the tokens that are kept.", gt=0)


class M2PO(CriticFree):
    """GRPO's advantages; ``-m r A`` with ``r`` the ratio to the sampler and ``m`` the mask of ``second_moment_mask``.

    The mask is of the whole batch and of the policy before the step's first update, so that no split of the batch
    changes it; it needs a forward pass for that policy's log-probs. With ``actor.use_decoupled_loss`` the loss clips
    around that policy too, which bounds the later ones of several updates (``ppo_n_minibatches`` above 1). A dropped
    token keeps its place in the denominator, and the KL and entropy terms apply to it.

    Args:
        config: the ``actor`` section.
        threshold: see ``M2POConfig``.
    """

    name = "m2po"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.loss_agg": "token_mean",
        "actor.gae_lambda": 1.0,
    }

    def __init__(self, config: PPOActorConfig, threshold: float = 0.04) -> None:
        super().__init__(config)
        self.threshold = threshold

    @property
    def needs_prox_logprobs(self) -> bool:
        return True

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        if self.config.prox_logp != "recompute":
            raise ConfigError(
                f"is {self.config.prox_logp}, but m2po measures how far the policy is from the sampler before the "
                "step. Use recompute.",
                key="actor.prox_logp",
            )
        if not self.config.is_decoupled:
            unclipped = "clips nothing without actor.use_decoupled_loss. Leave it out, or set that to true."
            self._reject({"c_clip": (None, unclipped), "eps_clip_higher": (None, unclipped)})

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """As for GRPO, and 0 for the tokens that are dropped; ``prox_logprobs`` ``[T]`` is read."""
        from areal_core.algorithms.second_moment import second_moment_mask

        batch, stats = super().compute_advantages(batch)
        mask, advantages = batch["loss_mask"], batch["advantages"]
        dropped, before, after = second_moment_mask(
            batch["prox_logprobs"], batch["logprobs"], advantages, mask, self.threshold
        )
        if batch.num_seqs:
            stats["m2/before"], stats["m2/after"] = float(before), float(after)
            stats["m2/dropped_fraction"] = float(dropped.sum() / mask.sum().clamp(min=1))
        return batch.with_tokens(advantages=advantages.masked_fill(dropped, 0.0)), stats

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import policy_loss
        from areal_core.algorithms.weighted_losses import surrogate_loss

        if self.config.is_decoupled:
            return super().loss(output, batch)
        return policy_loss(self.config, output, batch, surrogate_loss)
