"""Metrics of a batch of episodes, and what is told of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.errors import ArealError, BadInputError
from areal_core.rollout.episode import OUTCOMES, Episode, Group


def outcome_stats(episodes: Iterable[Episode], prefix: str) -> dict[str, float]:
    """Episodes by outcome, and the reasons of those that were rejected."""
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    attempts = 0
    for episode in episodes:
        outcomes[episode.outcome] += 1
        attempts += max(0, episode.attempts - 1)
        if episode.outcome == "rejected":
            reasons[episode.reason] += 1
    stats = {f"{prefix}/{outcome}": float(outcomes[outcome]) for outcome in OUTCOMES}
    stats[f"{prefix}/retries"] = float(attempts)
    stats.update({f"{prefix}/rejected/{reason}": float(count) for reason, count in sorted(reasons.items())})
    return stats


def trajectory_stats(trajectories: Sequence[Trajectory], version: int, prefix: str) -> dict[str, float]:
    """Rewards, lengths in tokens, share of truncated completions, turns, and age in versions.

    Named rewards are unweighted, and over the trajectories that have them. Every trajectory has a trained token; the
    controller accepts no other.
    """
    if not trajectories:
        return {}
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    lengths = np.array([len(t) for t in trajectories], dtype=np.int64)
    starts = lengths.cumsum() - lengths
    mask = np.concatenate([t.loss_mask for t in trajectories])
    versions = np.concatenate([t.versions for t in trajectories])
    trained = np.add.reduceat(mask, starts, dtype=np.int64)
    positions = np.flatnonzero(mask)
    prompts = positions[np.searchsorted(positions, starts)] - starts
    first = np.minimum.reduceat(np.where(mask, versions, np.iinfo(np.int32).max), starts)
    lag = np.maximum(0, version - first.astype(np.int64))
    stats = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "reward_min": rewards.min(),
        "reward_max": rewards.max(),
        "trajectories": len(trajectories),
        "sequence_len": lengths.mean(),
        "prompt_len": prompts.mean(),
        "completion_len": trained.mean(),
        "completion_len_max": trained.max(),
        "tokens": lengths.sum(),
        "trained_tokens": trained.sum(),
        "truncated": float(np.mean([t.stop_reason == "length" for t in trajectories])),
        "turns": float(np.mean([t.n_turns for t in trajectories])),
        "version_lag_mean": lag.mean(),
        "version_lag_max": lag.max(),
    }
    for name in sorted({name for t in trajectories for name in t.rewards}):
        values = np.array([t.rewards[name] for t in trajectories if name in t.rewards], dtype=np.float64)
        stats[f"reward/{name}"], stats[f"reward_std/{name}"] = values.mean(), values.std()
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


def nothing_accepted(groups: Sequence[Group], what: str) -> ArealError:
    """Why no trajectory of ``groups`` could be used. Bad input where the reward is to blame, for it alone."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts: dict[str, int] = {}
    for episode in episodes:
        label = episode.outcome + (f" ({episode.reason})" if episode.reason else "")
        counts[label] = counts.get(label, 0) + 1
    summary = ", ".join(f"{count} {label}" for label, count in sorted(counts.items(), key=lambda item: -item[1]))
    message = f"no episode of {what} was accepted: {summary or 'it has no rows'}."
    errors = [episode.error for episode in episodes if episode.error is not None]
    if errors:
        message += f" For example: {errors[0]}"
    by_reward = [e for e in episodes if e.error is not None and e.outcome == "rejected"]
    if by_reward and all(e.error is not None or e.reason == "incomplete_group" for e in episodes):
        return BadInputError(message)
    return ArealError(message)


def episode_info(episode: Episode, version: int) -> dict[str, Any]:
    """What an outcome callback is told, JSON-compatible; ``version`` is the trainer's."""
    group = episode.group
    return {
        "uid": group.uid,
        "sample": episode.sample,
        "split": group.split,
        "reason": episode.reason,
        "error": f"{type(episode.error).__name__}: {episode.error}" if episode.error is not None else None,
        "attempts": episode.attempts,
        "seconds": episode.seconds,
        "version": version,
    }
