"""DAPO: clip-higher, dynamic sampling, token mean, soft overlong punishment (arXiv:2503.14476).

Imports torch only when it computes, so that reading ``presets`` is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from areal_core.algorithms.critic_free import CriticFree
from areal_core.api.batch import PackedBatch
from areal_core.api.configs import PPOActorConfig
from areal_core.config.fields import option
from areal_core.errors import ConfigError


@attrs.define(kw_only=True)
class DAPOConfig:
    """Options of the algorithm `dapo`."""

    dynamic_sampling: bool = option(
        True, "Sample other prompts in place of groups whose rewards are all equal, until the batch is full."
    )
    max_sampled_batches: int = option(
        10, "Most groups sampled for one step, in batches; then the step has what passed. None passed: an error.", ge=1
    )
    overlong_max_length: int | None = option(
        None,
        "Sampled tokens from which on the overlong penalty is full, e.g. ${gconfig.max_new_tokens}; None: no penalty.",
        ge=1,
    )
    overlong_cache_length: int | None = option(
        None, "Tokens below overlong_max_length over which the penalty grows; a fifth of it in the paper.", ge=1
    )
    overlong_penalty: float = option(1.0, "Size of the full penalty, in units of the reward.", gt=0)


class DAPO(CriticFree):
    """GRPO's advantages, clip range 0.2 below and 0.28 above 1 (eq. 10), mean over tokens (eq. 12), no KL.

    Groups whose rewards are all equal do not enter the batch (eq. 11): their advantage is 0, and they only thin it out.
    With ``overlong_max_length`` the rewards are ``r + overlong_penalty * R_length`` (eq. 13) before anything else.

    Args:
        config: the ``actor`` section.
        overlong_max_length, overlong_cache_length, overlong_penalty, dynamic_sampling, max_sampled_batches: see
            ``DAPOConfig``.
    """

    name = "dapo"
    presets: ClassVar[Mapping[str, Any]] = {
        "actor.reward_norm.mean_level": "group",
        "actor.reward_norm.std_level": "group",
        "actor.eps_clip": 0.2,
        "actor.eps_clip_higher": 0.28,
        "actor.loss_agg": "token_mean",
        "actor.kl_ctl": 0.0,
        "actor.gae_lambda": 1.0,
    }

    def __init__(
        self,
        config: PPOActorConfig,
        overlong_max_length: int | None = None,
        overlong_cache_length: int | None = None,
        overlong_penalty: float = 1.0,
        dynamic_sampling: bool = True,
        max_sampled_batches: int = 10,
    ) -> None:
        super().__init__(config)
        self.dynamic_sampling, self._max_sampled_batches = dynamic_sampling, max_sampled_batches
        self.max_length, self.cache_length = overlong_max_length, overlong_cache_length
        self.penalty = overlong_penalty

    def check(self, *, group_size: int, has_ref: bool, has_critic: bool) -> None:
        super().check(group_size=group_size, has_ref=has_ref, has_critic=has_critic)
        lengths = {"overlong_max_length": self.max_length, "overlong_cache_length": self.cache_length}
        given = [name for name, value in lengths.items() if value is not None]
        if len(given) == 1:
            (missing,) = set(lengths) - set(given)
            raise ConfigError(
                f"is missing, but algorithm.dapo.{given[0]} is {lengths[given[0]]}: the overlong penalty needs both. "
                "In the paper they are 20480 and 4096.",
                key=f"algorithm.dapo.{missing}",
            )
        if self.max_length is not None and self.cache_length is not None and self.cache_length > self.max_length:
            raise ConfigError(
                f"is {self.cache_length}, above algorithm.dapo.overlong_max_length ({self.max_length}), so that every "
                "completion would be punished. Use about a fifth of it.",
                key="algorithm.dapo.overlong_cache_length",
            )

    @property
    def filters_groups(self) -> bool:
        return self.dynamic_sampling

    def accepts_group(self, rewards: Sequence[float]) -> bool:
        return not self.dynamic_sampling or min(rewards) < max(rewards)

    @property
    def max_sampled_batches(self) -> int:
        return self._max_sampled_batches

    def compute_advantages(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        """As for GRPO, of punished rewards; ``rewards`` of the batch and their statistics stay without the penalty."""
        if self.max_length is None or self.cache_length is None:
            return super().compute_advantages(batch)
        from areal_core.algorithms import clipped
        from areal_core.algorithms.aggregate import trained_lengths
        from areal_core.algorithms.length_penalty import overlong_penalty

        lengths = trained_lengths(batch["loss_mask"], batch.cu_seqlens)
        penalty = self.penalty * overlong_penalty(lengths, self.max_length, self.cache_length)
        punished = batch.with_rows(rewards=batch["rewards"] + penalty)
        rewards = clipped.shaped_rewards(self.config, punished)
        batch = batch.with_tokens(advantages=clipped.outcome_advantages(self.config, batch, rewards))
        stats = clipped.advantage_stats(batch)
        if batch.num_seqs:
            stats["overlong_penalty/mean"] = float(penalty.mean())
        return batch, stats
