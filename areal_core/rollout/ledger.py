"""The account of episodes that ended: what the trainer, the metrics and the observer of a run are told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from areal_core.api.io_struct import Trajectory
from areal_core.rollout.episode import OUTCOMES, Group, Outcome, RolloutResult
from areal_core.rollout.stats import episode_info, outcome_stats, trajectory_stats

#: ``on_outcome(trajectory or None, outcome, info)``. ``info``: ``uid``, ``sample``, ``split``, ``reason``, ``error`` (a
#: text or None), ``attempts``, ``seconds``, ``version`` (of the controller), all JSON-compatible.
OutcomeCallback = Callable[[Trajectory | None, Outcome, dict[str, Any]], None]


class Ledger:
    """Counts every episode once, when it is collected.

    Args:
        on_outcome: told of each.

    Attributes:
        totals: training episodes by outcome.
        dropped: training groups that were left out, by reason.
    """

    def __init__(self, on_outcome: OutcomeCallback | None) -> None:
        self.on_outcome = on_outcome
        self.totals: dict[str, float] = dict.fromkeys(OUTCOMES, 0.0)
        self.dropped: dict[str, float] = {"incomplete": 0.0, "stale": 0.0, "filtered": 0.0}

    def collect(
        self, groups: Sequence[Group], dropped: Sequence[Group], prefix: str, version: int, start: float
    ) -> RolloutResult:
        """The trajectories of ``groups``, and the metrics of these and of ``dropped``; neither is reported yet."""
        trajectories: list[Trajectory] = []
        seen: dict[str, int] = {}
        for group in groups:
            times = seen[group.uid] = seen.get(group.uid, 0) + 1
            for episode in group.episodes:
                if episode.outcome != "accepted":
                    continue
                if times > 1:  # the same row twice in a batch: still two groups
                    for trajectory in episode.trajectories:
                        trajectory.group_id = f"{group.uid}+{times - 1}"
                trajectories += episode.trajectories
        ended = [*dropped, *groups]
        stats = trajectory_stats(trajectories, version, prefix)
        stats.update(outcome_stats([episode for group in ended for episode in group.episodes], prefix))
        stats[f"{prefix}/seconds"] = time.monotonic() - start
        if prefix == "rollout":
            stats["rollout/groups"] = float(sum(group.n_accepted > 0 for group in groups))
            reasons = Counter(group.dropped for group in ended)
            stats.update({f"rollout/{reason}_groups": float(reasons[reason]) for reason in self.dropped})
        return RolloutResult(trajectories, stats)

    def report(self, groups: Iterable[Group], version: int) -> None:
        """Count the episodes, and tell the observer of each."""
        groups = list(groups)
        outcomes = Counter(e.outcome for group in groups if group.split != "eval" for e in group.episodes)
        for outcome, count in outcomes.items():
            self.totals[outcome] += count
        for group in groups:
            if group.dropped:
                self.dropped[group.dropped] += 1
        if self.on_outcome is None:
            return
        for group in groups:
            for episode in group.episodes:
                info = episode_info(episode, version)
                for trajectory in episode.trajectories or (None,):
                    self.on_outcome(trajectory, episode.outcome, info)

    def export_totals(self) -> dict[str, float]:
        stats = {f"rollout/total/{outcome}": count for outcome, count in self.totals.items()}
        stats.update({f"rollout/total/{name}_groups": count for name, count in self.dropped.items()})
        return stats

    def state_dict(self) -> dict[str, float]:
        return {**self.totals, **self.dropped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for counts in (self.totals, self.dropped):
            counts.update({name: state[name] for name in counts if name in state})
