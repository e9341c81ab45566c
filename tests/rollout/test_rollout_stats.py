import numpy as np

from areal_core.api.io_struct import Trajectory
from areal_core.rollout.episode import Episode, Group, read_first_versions
from areal_core.rollout.stats import outcome_stats, trajectory_stats


def trajectory(prompt, versions, reward, **fields):
    """``versions``: of the tokens after the prompt, -1 for those of a user in between."""
    mask = [False] * prompt + [version >= 0 for version in versions]
    length = len(mask)
    return Trajectory(
        input_ids=np.arange(length),
        loss_mask=mask,
        logprobs=np.zeros(length),
        versions=[-1] * prompt + versions,
        reward=reward,
        **fields,
    )


TRAJECTORIES = [
    trajectory(2, [5, 6, 6], 1.0, stop_reason="length", rewards={"format": 1.0}),
    trajectory(4, [4, -1, -1, 7], 0.0, n_turns=2, rewards={"format": 0.0, "answer": 3.0}),
]


def test_trajectory_stats_when_given_trajectories_match_their_definition():
    stats = trajectory_stats(TRAJECTORIES, version=7, prefix="rollout")

    assert stats == {
        "rollout/reward": 0.5,
        "rollout/reward_std": 0.5,
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 1.0,
        "rollout/trajectories": 2.0,
        "rollout/sequence_len": 6.5,
        "rollout/prompt_len": 3.0,
        "rollout/completion_len": 2.5,
        "rollout/completion_len_max": 3.0,
        "rollout/tokens": 13.0,
        "rollout/trained_tokens": 5.0,
        "rollout/truncated": 0.5,
        "rollout/turns": 1.5,
        "rollout/version_lag_mean": 2.5,
        "rollout/version_lag_max": 3.0,
        "rollout/reward/format": 0.5,
        "rollout/reward/answer": 3.0,
        "rollout/reward_std/format": 0.5,
        "rollout/reward_std/answer": 0.0,
    }


def test_trajectory_stats_when_there_are_none_are_empty():
    assert trajectory_stats([], version=0, prefix="eval") == {}


def test_first_versions_when_read_together_are_those_of_each_group():
    groups = [Group({}, str(n), 2, None, "train") for n in range(4)]
    for group, trajectories in zip(groups, [[1], [0], [], [0, 1]], strict=True):
        for episode, index in zip(group.episodes, trajectories, strict=False):
            episode.outcome, episode.trajectories = "accepted", [TRAJECTORIES[index]]
    # Of an episode that was rejected, nothing counts.
    groups[1].episodes[1].trajectories = [TRAJECTORIES[1]]

    read_first_versions(groups)

    assert [group.first_version for group in groups] == [4, 5, -1, 4]


def test_outcome_stats_when_counted_name_the_reasons():
    group = Group({}, "u", 4, None, "train")
    episodes = [Episode(group, n) for n in range(4)]
    episodes[0].outcome = "accepted"
    episodes[1].reject("reward_nan")
    episodes[2].reject("workflow")
    episodes[2].attempts = 3

    assert outcome_stats(episodes, "rollout") == {
        "rollout/accepted": 1.0,
        "rollout/rejected": 2.0,
        "rollout/failed": 0.0,
        "rollout/cancelled": 1.0,
        "rollout/retries": 2.0,
        "rollout/rejected/reward_nan": 1.0,
        "rollout/rejected/workflow": 1.0,
    }
