"""The records of a rollout: episodes, the group they belong to, and what a caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.errors import ArealError

Outcome = Literal["accepted", "rejected", "failed", "cancelled"]

OUTCOMES: tuple[Outcome, ...] = ("accepted", "rejected", "failed", "cancelled")


class EpisodeRejected(Exception):
    """Raised by a workflow to reject its episode with a reason; it is counted and not tried again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class EpisodeTimeout(ArealError):
    """An episode that took longer than ``rollout.episode_timeout``."""


class RolloutInterrupted(ArealError):
    """``should_stop`` said to stop while the controller waited for episodes."""


@attrs.define(eq=False)
class RolloutResult:
    """What a rollout gives the trainer.

    Attributes:
        trajectories: in the order of the rows, and of the samples in a row; ``group_id`` is set.
        stats: metrics of these episodes, named ``rollout/...`` (``eval/...`` for an evaluation).
    """

    trajectories: list[Trajectory]
    stats: dict[str, float] = attrs.field(factory=dict)


class Episode:
    """One sample of a row; it ends in exactly one outcome."""

    __slots__ = (
        "admitted",
        "attempts",
        "ended",
        "error",
        "group",
        "outcome",
        "reason",
        "sample",
        "seconds",
        "start",
        "task",
        "timed_out",
        "trajectories",
    )

    def __init__(self, group: Group, sample: int) -> None:
        self.group = group
        self.sample = sample
        self.task: asyncio.Task[None] | None = None
        self.ended = self.timed_out = self.admitted = False
        self.attempts = 0
        self.start = self.seconds = 0.0
        self.outcome: Outcome = "cancelled"
        self.reason = ""
        self.error: BaseException | None = None
        self.trajectories: Sequence[Trajectory] = ()

    def reject(self, reason: str) -> None:
        self.outcome, self.reason = "rejected", reason


class Group:
    """The samples of one row."""

    __slots__ = (
        "cache",
        "dropped",
        "episodes",
        "first_version",
        "job",
        "n_accepted",
        "order",
        "remaining",
        "row",
        "seed",
        "size",
        "split",
        "uid",
        "version",
        "workflow",
    )

    def __init__(
        self, row: Mapping[str, Any], uid: str, size: int, workflow: Any, split: str, job: Job | None = None
    ) -> None:
        self.row, self.uid, self.size, self.workflow, self.split, self.job = row, uid, size, workflow, split, job
        self.order = 0
        self.seed: int | None = None  # made when its first episode is played
        self.first_version = -1
        self.version = 0  # of the trainer, when it was let in
        self.dropped = ""
        self.n_accepted = 0  # once it is complete
        self.remaining = size
        self.cache: dict[Any, Any] = {}
        self.episodes = [Episode(self, sample) for sample in range(size)]

    @property
    def accepted(self) -> list[Episode]:
        return [episode for episode in self.episodes if episode.outcome == "accepted"]

    def drop(self, reason: str) -> None:
        """Leave the whole group out: ``incomplete``, ``stale`` or ``filtered``."""
        self.dropped = reason
        for episode in self.accepted:
            episode.reject(f"{reason}_group")
        self.n_accepted = 0


class Job:
    """Groups that a caller waits for together.

    Attributes:
        lane: ``sync`` or ``eval``; each has its own concurrency limit.
        remaining: groups that are not complete.
        barrier: episodes that have yet to send their first request (or end) before generation starts.
    """

    __slots__ = ("barrier", "groups", "lane", "remaining")

    def __init__(self, lane: Literal["sync", "eval"]) -> None:
        self.lane = lane
        self.groups: list[Group] = []
        self.remaining = 0
        self.barrier = 0


def read_first_versions(groups: Sequence[Group]) -> None:
    """Set ``first_version``, the oldest version among the sampled tokens of what was accepted; -1 if nothing was.

    For many groups together: numpy's calls cost more than the few tokens that one of them has.
    """
    trajectories: list[Trajectory] = []
    found: list[Group] = []
    firsts: list[int] = []  # index of the first trajectory of each
    for group in groups:
        before = len(trajectories)
        if group.first_version < 0:
            for episode in group.episodes:
                if episode.outcome == "accepted":
                    trajectories += episode.trajectories
        if len(trajectories) > before:
            found.append(group)
            firsts.append(before)
    if not found:
        return
    parts = [trajectory.versions for trajectory in trajectories]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    starts = (lengths.cumsum() - lengths)[firsts]
    versions = np.concatenate(parts)
    mask = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
    # Every trajectory has a sampled token, see results.as_trajectories.
    oldest = np.minimum.reduceat(np.where(mask, versions, np.iinfo(versions.dtype).max), starts)
    for group, version in zip(found, oldest.tolist(), strict=True):
        group.first_version = version
