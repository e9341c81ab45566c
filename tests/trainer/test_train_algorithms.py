"""`areal train` with what reaches into rollout and trainer: dynamic sampling, corrections, several rewards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import HERE, areal, read_metrics, torchrun, untimed, write_yaml

from areal_core.api.load import load_run_config
from areal_core.errors import ArealError
from areal_core.trainer.run import train


@pytest.fixture(autouse=True)
def _rewards_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def run(plain: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    return read_metrics(train(load_run_config(write_yaml(tmp_path / "run.yaml", plain), [])).path)


@pytest.mark.parametrize("staleness", [0, 2])
def test_train_when_dapo_replaces_groups_without_variance(
    rl_plain: dict[str, Any], tmp_path: Path, staleness: int
) -> None:
    # Arrange: about one completion in three is rewarded, so that half of the groups of two have no variance.
    rl_plain["algorithm"] = {"name": "dapo"}
    rl_plain["reward"] = {"name": "trainer_rewards:rare_reward_fn"}
    rl_plain["gconfig"]["n_samples"] = 2
    rl_plain["rollout"]["max_head_offpolicyness"] = staleness
    rl_plain["train_dataset"]["arithmetic"]["size"] = 256

    # Act
    metrics = run(rl_plain, tmp_path)

    # Assert
    assert sum(line["rollout/filtered_groups"] for line in metrics) > 0
    for line in metrics:
        assert line["rollout/groups"] == 2
        assert line["train/group_zero_variance"] == 0.0
        assert line["rollout/reward"] == 0.5
        assert 0 < line["rollout/reward_unfiltered"] < 1
        assert line.get("rollout/rejected/filtered_group", 0) == 2 * line["rollout/filtered_groups"]
        assert line["rollout/version_lag_max"] <= staleness


def test_train_when_no_group_has_variance_says_what_to_do(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    rl_plain["algorithm"] = {"name": "dapo", "dapo": {"max_sampled_batches": 3}}
    rl_plain["reward"] = {"name": "trainer_rewards:always_one_reward_fn"}
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])

    with pytest.raises(ArealError, match=r"dapo accepted none of the 6 groups of 4 samples .* step 1: .* reward is 1;"):
        train(config)


def test_train_when_corrected_reports_what_a_practitioner_reads(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    rl_plain["actor"] |= {
        "importance": {"level": "sequence", "mode": "mask", "lower": 0.5, "upper": 2.0},
        "kl_ctl": 0.01,
        "ppo_n_minibatches": 2,
        "mb_spec": {"max_tokens_per_mb": 64},
    }
    rl_plain["ref"] = {"path": rl_plain["actor"]["path"], "dtype": "float32"}
    rl_plain["rollout"]["max_head_offpolicyness"] = 1

    # Act
    metrics = run(rl_plain, tmp_path)

    # Assert
    ratios = {"ratio", "ratio_max", "behave_ratio", "behave_ratio_max", "behave_weight", "behave_dropped_fraction"}
    clips = {"clip_fraction", "clip_fraction_low", "clip_fraction_high"}
    kls = {"approx_kl", "prox_kl", "ref_kl", "entropy", "grad_norm", "logprob_gap", "logprob_gap_max"}
    advantages = {"advantage", "advantage/abs_mean", "reward/mean", "group_zero_variance", "completion_length/mean"}
    rollout = {"reward", "reward_std", "version_lag_mean", "version_lag_max", "completion_len", "truncated"}
    names = {f"train/{name}" for name in ratios | clips | kls | advantages} | {f"rollout/{name}" for name in rollout}
    for line in metrics:
        assert names - line.keys() == set()
        assert all(math.isfinite(line[name]) for name in names)
        assert line["train/logprob_gap_max"] >= line["train/logprob_gap"] >= 0
        assert line["train/ratio_max"] >= line["train/ratio"]
        assert 0 < line["train/entropy"] < math.log(400)
        assert line["train/clip_fraction"] == pytest.approx(
            line["train/clip_fraction_low"] + line["train/clip_fraction_high"]
        )


@pytest.mark.parametrize("method", ["loglinear", "rollout"])
def test_train_when_proximal_is_approximated_spares_a_forward_pass(
    rl_plain: dict[str, Any], tmp_path: Path, method: str
) -> None:
    rl_plain["actor"] |= {"use_decoupled_loss": True, "prox_logp": method}

    metrics = run(rl_plain, tmp_path)

    # On policy both take the sampler's own log-probs: the weight is 1 and the ratio is that of plain PPO.
    for line in metrics:
        assert line["train/behave_weight"] == pytest.approx(1.0, abs=1e-6)
        assert line["train/ratio"] == pytest.approx(1.0, abs=1e-4)


def test_train_when_gdpo_weighs_named_rewards(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    rl_plain["algorithm"] = {"name": "gdpo"}
    del rl_plain["reward"]
    rl_plain["rewards"] = {
        "even": {"name": "trainer_rewards:digits_reward_fn"},
        "short": {"name": "trainer_rewards:length_reward_fn", "weight": -0.5},
    }

    metrics = run(rl_plain, tmp_path)

    for line in metrics:
        assert line["rollout/reward"] == pytest.approx(
            line["rollout/reward/even"] - 0.5 * line["rollout/reward/short"], abs=1e-5
        )
        assert line["train/advantage/abs_mean"] > 0


@pytest.mark.slow
def test_resume_when_dapo_was_interrupted_equals_uninterrupted_run_bitwise(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange: rows that were drawn and not played must not be lost.
    rl_plain["algorithm"] = {"name": "dapo"}
    rl_plain["reward"] = {"name": "trainer_rewards:rare_reward_fn"}
    rl_plain["gconfig"]["n_samples"] = 2
    rl_plain["train_dataset"] |= {"batch_size": 3, "arithmetic": {"size": 256}}
    rl_plain["total_train_steps"] = 6
    rl_plain["checkpoint"] = {"freq_steps": 2, "keep_best": 0, "save_final": False}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    straight = areal("train", path, "run.name=straight")
    first = areal("train", path, "run.name=broken", "total_train_steps=4")
    second = areal("train", path, "run.name=broken", "total_train_steps=6", "--resume", "must")

    # Assert
    assert (straight.returncode, first.returncode, second.returncode) == (0, 0, 0), second.stderr
    runs = tmp_path / "runs"
    assert untimed(read_metrics(runs / "broken")) == untimed(read_metrics(runs / "straight"))
    assert sum(line["rollout/filtered_groups"] for line in read_metrics(runs / "straight")) > 0


@pytest.mark.slow
def test_train_when_two_ranks_reports_the_same_maxima_and_means(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    rl_plain["actor"] |= {"importance": {"upper": 1.5}, "ppo_n_minibatches": 1}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    one = areal("train", path, "run.name=one", "total_train_steps=1")
    two = torchrun(2, "train", path, "run.name=two", "total_train_steps=1", "actor.backend=fsdp:d2")

    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    (first,), (second,) = (read_metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for name in ("ratio", "ratio_max", "behave_ratio_max", "entropy", "logprob_gap_max", "approx_kl", "policy_loss"):
        assert second[f"train/{name}"] == pytest.approx(first[f"train/{name}"], rel=1e-4, abs=1e-5), name
