"""Metrics of a batch of episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.rollout.episode import OUTCOMES, Episode


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

    Every trajectory has a trained token; the controller accepts no other.
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
        stats[f"reward/{name}"] = float(np.mean([t.rewards[name] for t in trajectories if name in t.rewards]))
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}
