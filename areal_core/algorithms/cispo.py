"""CISPO: the importance weight is clipped, and no token loses its gradient (MiniMax-M1, arXiv:2506.13585).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import PPOActorConfig
from areal_core.config.fields import option
from areal_core.errors import ConfigError


@attrs.define(kw_only=True)
class CISPOConfig:
    """Options of the algorithm `cispo`."""

    max_weight: float = option(5.0, "Upper bound of the importance weight, 1 + eps_high in the paper.", ge=1)
    min_weight: float = option(0.0, "Lower bound of the importance weight; 0, as in the paper: none.", ge=0, le=1)


class CISPO(CriticFree):
    """GRPO's advantages; ``-sg(clip(r, min_weight, max_weight)) A log p``, mean over tokens (eq. 4 and 5).

    The paper sets no lower bound and tunes the upper one; the default of 5 is this project's choice.

    Args:
        config: the ``actor`` section.
        max_weight, min_weight: see ``CISPOConfig``.
    """

    name = "cispo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.loss_agg": "token_mean",
        "actor.gae_lambda": 1.0,
    }

    def __init__(self, config: PPOActorConfig, max_weight: float = 5.0, min_weight: float = 0.0) -> None:
        super().__init__(config)
        self.max_weight, self.min_weight = max_weight, min_weight

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        if self.min_weight >= self.max_weight:
            raise ConfigError(
                f"is {self.min_weight}, not below algorithm.cispo.max_weight ({self.max_weight}), so the weight would "
                "not depend on the policy. Use 0 for no lower bound.",
                key="algorithm.cispo.min_weight",
            )
        bounds = "Leave it out; the bounds are algorithm.cispo.max_weight and min_weight."
        self._reject(
            {
                "use_decoupled_loss": (
                    False,
                    "takes its importance weight to the sampler already. Use false, or actor.importance.",
                ),
                "c_clip": (None, f"clips the weight, not the loss. {bounds}"),
                "eps_clip_higher": (None, f"clips the weight, not the loss. {bounds}"),
            }
        )

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import policy_loss
        from areal_core.algorithms.weighted_losses import cispo_loss

        weighted = functools.partial(cispo_loss, min_weight=self.min_weight, max_weight=self.max_weight)
        return policy_loss(self.config, output, batch, weighted)
