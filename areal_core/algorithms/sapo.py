"""SAPO: a soft gate on the ratio in place of a clip (arXiv:2511.20347).

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


@attrs.define(kw_only=True)
class SAPOConfig:
    """Options of the algorithm `sapo`."""

    tau_pos: float = option(1.0, "Temperature of the gate where the advantage is positive.", gt=0)
    tau_neg: float = option(1.05, "Temperature of the gate elsewhere; a higher one lets less through.", gt=0)


class SAPO(CriticFree):
    """GRPO's advantages; ``-A (4 / tau) sigmoid(tau (r - 1))``, mean of the sequences' means.

    Args:
        config: the ``actor`` section.
        tau_pos, tau_neg: see ``SAPOConfig``.
    """

    name = "sapo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.loss_agg": "seq_mean",
        "actor.gae_lambda": 1.0,
    }

    def __init__(self, config: PPOActorConfig, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        super().__init__(config)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        gate = "has a soft gate and no clip. Leave it out; its width is algorithm.sapo.tau_pos and tau_neg."
        self._reject(
            {
                "use_decoupled_loss": (
                    False,
                    "is defined for one ratio, to the sampler. Use false, or actor.importance.",
                ),
                "c_clip": (None, gate),
                "eps_clip_higher": (None, gate),
            }
        )

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import policy_loss
        from areal_core.algorithms.weighted_losses import sapo_loss

        gated = functools.partial(sapo_loss, tau_pos=self.tau_pos, tau_neg=self.tau_neg)
        return policy_loss(self.config, output, batch, gated)
