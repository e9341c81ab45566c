"""GSPO: the ratio of a whole sequence is clipped, not that of a token (arXiv:2507.18071).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.errors import ConfigError


class GSPO(CriticFree):
    """GRPO's advantages; the clipped surrogate of ``s_i``, the geometric mean of the token ratios (eq. 5 to 7).

    The clip range is that of section 5.1, three orders below PPO's: a mean over a sequence stays close to 1. The
    objective is the mean over sequences; ``loss_agg: token_mean`` would weigh each by its length.
    """

    name = "gspo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.eps_clip": 3e-4,
        "actor.eps_clip_higher": 4e-4,
        "actor.loss_agg": "seq_mean",
        "actor.gae_lambda": 1.0,
    }

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        self._reject(
            {
                "use_decoupled_loss": (
                    False,
                    "has one ratio for a sequence, and that weight is of a token. Use false, or actor.importance with "
                    "level: sequence.",
                ),
                "kl_in_reward": (False, "has one advantage for a sequence. Use false: the KL is then in the loss."),
                "discount": (1.0, "has one advantage for a sequence. Use 1."),
            }
        )

        importance = self.config.importance
        if importance is not None and importance.level == "token":
            raise ConfigError(
                "is token, but gspo has one ratio for a sequence. Use sequence.", key="actor.importance.level"
            )

    def loss(self, output: TokenOutput, batch: PackedBatch) -> LossOutput:
        from areal_core.algorithms.clipped import policy_loss
        from areal_core.algorithms.sequence_losses import sequence_clip_loss

        clip = functools.partial(
            sequence_clip_loss,
            loss_mask=batch["loss_mask"],
            cu_seqlens=batch.cu_seqlens,
            eps_clip=self.config.eps_clip,
            eps_clip_higher=self.config.eps_clip_higher,
            c_clip=self.config.c_clip,
        )
        return policy_loss(self.config, output, batch, clip)
