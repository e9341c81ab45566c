"""Batches from which groups were filtered: rows in reserve, and the bound on how many groups are tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_core.rollout.episode import Group

logger = getLogger("RolloutController")


class RowSource(Protocol):
    """What ``prepare_batch`` draws rows from, e.g. ``areal_core.data.loader.DataLoader``."""

    def next_batch(self) -> list[dict[str, Any]]: ...


class NoGroupPassed(ArealError):
    """The group filter refused every group that was tried for a batch.

    Attributes:
        tried: groups that were played.
        mean_reward: of their trajectories.
    """

    def __init__(self, tried: int, mean_reward: float) -> None:
        self.tried, self.mean_reward = tried, mean_reward
        super().__init__(
            f"the group filter refused all {tried} groups that were tried for one batch (mean reward {mean_reward:.3g})"
        )


class Reserve:
    """Rows that were drawn from the data and not played yet."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, Any]] = deque()

    def draw(self, source: RowSource, count: int) -> list[dict[str, Any]]:
        """``count`` rows, first from the reserve; what the source gave beyond them is kept."""
        while len(self.rows) < count:
            self.rows.extend(source.next_batch())
        return [self.rows.popleft() for _ in range(count)]


def filtered(groups: Iterable[Group]) -> list[Group]:
    return [group for group in groups if group.dropped == "filtered"]


def mean_reward(groups: Iterable[Group]) -> float:
    """Over every trajectory that was scored, whether or not it is used; NaN if there is none."""
    rewards = [t.reward for group in groups for episode in group.episodes for t in episode.trajectories]
    return sum(rewards) / len(rewards) if rewards else float("nan")


def settle_for(kept: int, wanted: int, refused: Sequence[Group]) -> None:
    """The bound is reached: go on with ``kept`` groups, and say so; with none, raise.

    Raises:
        NoGroupPassed: if ``kept`` is 0.
    """
    if kept == 0:
        raise NoGroupPassed(len(refused), mean_reward(refused))
    logger.warning(
        "this batch has %d groups instead of %d: the group filter refused %d, the most that may be tried",
        kept,
        wanted,
        len(refused),
    )
