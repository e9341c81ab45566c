"""From the configuration to the reward that a workflow calls: one function, or the weighted sum of several."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from areal_core.api.configs import RewardConfig, RLConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.api.reward_api import KINDS, AsyncRewardWrapper, RewardError, Score
from areal_core.api.reward_worker import LARGEST
from areal_core.config.plain import plugin_keywords
from areal_core.errors import BadInputError
from areal_core.logging import getLogger

logger = getLogger("Reward")


class PluginLoader(Protocol):
    """What is needed of the plugin manager."""

    def load(self, registry: str, name: str, key: str | None = None) -> Any: ...


class ScoredReward:
    """One reward, with its weight and a policy for its errors.

    ``reject`` lets ``RewardError`` through, and the controller rejects the episode with the reason ``reward_KIND``;
    ``zero`` scores 0; ``raise`` stops the run.
    """

    def __init__(self, reward: AsyncRewardWrapper, config: RewardConfig) -> None:
        self.reward, self.on_error, self.weight = reward, config.on_error, config.weight
        self._logged: set[str] = set()

    async def __call__(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **data: Any
    ) -> float:
        return checked_total(self.weight * await self.value(prompt, completions, prompt_ids, completion_ids, **data))

    async def value(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **data: Any
    ) -> float:
        """What the function gives, without its weight."""
        try:
            return await self.reward(prompt, completions, prompt_ids, completion_ids, **data)
        except RewardError as error:
            self._log(error)
            if self.on_error == "reject":
                raise
            if self.on_error == "zero":
                return 0.0
            raise BadInputError(
                f"{error}. A reward returns a finite number; {self.reward.key}.on_error: reject or zero would go on "
                "without it."
            ) from error

    def _log(self, error: RewardError) -> None:
        """Once for each kind: a reward that always fails would else show in the metrics only."""
        if self.on_error == "raise" or error.kind in self._logged:
            return
        self._logged.add(error.kind)
        what = "its episode is rejected" if self.on_error == "reject" else "it counts 0"
        where = f"{self.reward.key}.on_error: {self.on_error}"
        logger.warning("%s; %s (%s). Later ones of this kind are counted only", error, what, where)

    @property
    def stats(self) -> dict[str, int]:
        """Failed calls so far by kind."""
        return self.reward.stats

    def export_stats(self, prefix: str = "reward") -> dict[str, float]:
        """``PREFIX/calls``, ``PREFIX/seconds`` and ``PREFIX/errors/KIND`` since the last call of it."""
        return self.reward.export_stats(prefix)

    def destroy(self) -> None:
        """End its processes. May be called twice."""
        self.reward.destroy()


class CombinedReward:
    """The weighted sum of named rewards, as a ``Score``.

    Those of one completion are computed at the same time. When several fail, the error is that of the first by the
    order of the configuration, but for one that stops the run; each is counted.
    """

    def __init__(self, rewards: Mapping[str, ScoredReward]) -> None:
        self.rewards = dict(rewards)

    async def __call__(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **data: Any
    ) -> Score:
        # To the end in any case: what one of them finds wrong must not depend on which is faster.
        values = await asyncio.gather(
            *(
                reward.value(prompt, completions, prompt_ids, completion_ids, **data)
                for reward in self.rewards.values()
            ),
            return_exceptions=True,
        )
        failures = [value for value in values if isinstance(value, BaseException)]
        if failures:
            raise next((error for error in failures if not isinstance(error, RewardError)), failures[0])
        terms = {label: value for label, value in zip(self.rewards, values, strict=True) if isinstance(value, float)}
        return Score(checked_total(sum(self.rewards[label].weight * value for label, value in terms.items())), terms)

    @property
    def stats(self) -> dict[str, int]:
        """Failed calls so far by kind, over all."""
        each = [reward.stats for reward in self.rewards.values()]
        return {kind: sum(stats[kind] for stats in each) for kind in KINDS}

    def export_stats(self, prefix: str = "reward") -> dict[str, float]:
        """As :meth:`ScoredReward.export_stats`, for each label: ``PREFIX/LABEL/calls`` and so on."""
        stats: dict[str, float] = {}
        for label, reward in self.rewards.items():
            stats.update(reward.export_stats(f"{prefix}/{label}"))
        return stats

    def destroy(self) -> None:
        """End the processes of all. May be called twice."""
        for reward in self.rewards.values():
            reward.destroy()


class NoReward:
    """Stands for the reward of a run that names none, for workflows that score by themselves."""

    async def __call__(self, *args: Any, **data: Any) -> float:
        raise BadInputError(
            "the workflow asked for a reward, and the run has none. Name it: `reward: {name: ...}`, or "
            "`rewards: {LABEL: {name: ...}, ...}` for several."
        )

    @property
    def stats(self) -> dict[str, int]:
        """No call is counted."""
        return dict.fromkeys(KINDS, 0)

    def export_stats(self, prefix: str = "reward") -> dict[str, float]:
        return {}

    def destroy(self) -> None:
        """Nothing to end."""


class UnscoredReward(NoReward):
    """Stands for the reward of a run that does not learn from any: everything scores 0."""

    async def __call__(self, *args: Any, **data: Any) -> float:
        return 0.0


#: What a workflow is given as ``reward_fn``.
Reward = ScoredReward | CombinedReward | NoReward


def checked_total(total: float) -> float:
    """What a weighted reward comes to. Raises RewardError if a trajectory, of 32-bit floats, cannot hold it."""
    if abs(total) <= LARGEST:
        return total
    raise RewardError("inf", f"the weighted reward {total:g} is too large for a 32-bit float")


def build_reward(config: RewardConfig, manager: PluginLoader, *, key: str = "reward") -> AsyncRewardWrapper:
    """The function that a section names, with its options bound.

    Args:
        key: the section's key. A reward of ``rewards`` is called by its label in messages.
    """
    fn = manager.load("areal_rewards", config.name, key=f"{key}.name")
    if not callable(fn):
        raise BadInputError(f"{key}.name: {config.name!r} is a {type(fn).__name__}, not a function.")
    _check_signature(fn, f"{key}.name: {config.name!r}")
    options = plugin_keywords(config)
    if options:
        fn = functools.partial(fn, **options)
    label = key.partition(".")[2]
    return AsyncRewardWrapper(
        fn, timeout=config.timeout, max_workers=config.max_workers, name=label or config.name, key=key
    )


def _check_signature(fn: Any, what: str) -> None:
    """Raises BadInputError for what cannot be a reward, which would else show in the first episode of a run."""
    form = "(prompt, completions, prompt_ids, completion_ids, **data)"
    if isinstance(fn, type):
        raise BadInputError(
            f"{what} is a class. A reward is a function {form}, or an object with such a `__call__`, as "
            f"{fn.__name__}(...) may be."
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind_partial(None, None, None, None)
    except TypeError as error:
        raise BadInputError(f"{what} takes {signature}; a reward is called with {form}: {error}.") from error


def build_rewards(config: RLConfig | DistillConfig, manager: PluginLoader) -> Reward:
    """What scores a completion as ``config`` says; ``destroy`` it at the end.

    Raises:
        ConfigError: see ``RLConfig.reward_sections``.
        PluginError: if a name cannot be used.
    """
    sections = config.reward_sections
    made = {key: ScoredReward(build_reward(section, manager, key=key), section) for key, section in sections.items()}
    if not made:
        return UnscoredReward() if isinstance(config, DistillConfig) else NoReward()
    if "reward" in made:
        return made["reward"]
    return CombinedReward({key.partition(".")[2]: reward for key, reward in made.items()})
