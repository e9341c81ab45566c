"""One short run of every way to configure the rl trainer: each must train, and show what makes it different."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import HERE, read_metrics, weights, write_yaml

from areal_core.api.load import load_run_config
from areal_core.runs.run_dir import iter_trajectories
from areal_core.trainer.run import train


@pytest.fixture(autouse=True)
def _rewards_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def run(rl_plain: dict[str, Any], tmp_path: Path) -> Any:
    """Train two steps with some keys replaced; returns the run directory."""
    rl_plain["total_train_steps"] = 2
    rl_plain["evaluation"] = {"at_end": False}

    def go(**sections: Any) -> Path:
        for key, value in sections.items():
            if isinstance(value, dict) and isinstance(rl_plain.get(key), dict):
                rl_plain[key] = {**rl_plain[key], **value}
            else:
                rl_plain[key] = value
        return train(load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])).path

    return go


def finite(line: dict[str, Any], *names: str) -> None:
    for name in names:
        assert math.isfinite(line[name]), (name, line[name])


def test_ppo_when_it_has_a_critic_trains_both(run: Any, tiny_model: Path) -> None:
    # Act
    path = run(
        algorithm={"name": "ppo"},
        critic={"path": str(tiny_model), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        checkpoint={"keep_best": 0, "save_final": False, "freq_steps": 2},
    )

    # Assert
    for line in read_metrics(path):
        finite(line, "train/loss", "critic/loss", "critic/value", "critic/grad_norm", "train/grad_norm")
    assert (path / "checkpoints" / "step-000002" / "critic").is_dir()


def test_grpo_when_kl_to_the_reference_starts_at_zero_and_grows(run: Any, tiny_model: Path) -> None:
    # Act
    path = run(
        actor={"kl_ctl": 0.1, "path": str(tiny_model), "dtype": "float32", "optimizer": {"lr": 1e-2}},
        ref={"path": str(tiny_model), "dtype": "float32"},
    )

    # Assert: the policy is the reference before the first update, and is not after it.
    first, second = read_metrics(path)
    assert abs(first["train/ref_kl"]) < 1e-6
    assert second["train/ref_kl"] > 1e-4


def test_lora_when_trained_exports_merged_weights(run: Any, tiny_model: Path) -> None:
    # Act
    path = run(
        actor={
            "path": str(tiny_model),
            "dtype": "float32",
            "optimizer": {"lr": 1e-2},
            "lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]},
        },
        checkpoint={"keep_best": 0, "save_final": True},
    )

    # Assert: only the adapted matrices moved, and the sampler has had the merged weights too.
    before, after = weights(tiny_model), weights(path / "weights" / "final")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("q_proj" in name or "v_proj" in name for name in moved)
    assert all(line["train/logprob_gap"] < 1e-5 for line in read_metrics(path))


def test_multi_turn_when_the_answer_is_wrong_asks_again_and_trains_only_on_samples(run: Any) -> None:
    # Act
    path = run(workflow={"name": "multi_turn", "multi_turn": {"max_turns": 2, "success_threshold": 2.0}})

    # Assert
    lines = list(iter_trajectories(path, split="train"))
    assert {line["n_turns"] for line in lines} == {2}
    for line in lines:
        mask = [value for value, count in line["loss_mask"] for _ in range(count)]
        assert sum(mask) == len(line["logprobs"])
        # prompt, first answer, feedback, second answer
        assert [value for value, _ in line["loss_mask"]] == [0, 1, 0, 1]


def test_decoupled_loss_when_there_are_several_mini_batches_recomputes_the_proximal_policy(run: Any) -> None:
    # Act
    path = run(actor={"use_decoupled_loss": True, "ppo_n_minibatches": 2})

    # Assert: on policy the behaviour weight is 1.
    for line in read_metrics(path):
        assert line["train/behave_weight"] == pytest.approx(1.0, abs=1e-4)
        finite(line, "train/loss", "train/grad_norm")


def test_entropy_bonus_when_set_reports_the_entropy(run: Any) -> None:
    path = run(actor={"entropy_coef": 0.01})

    for line in read_metrics(path):
        assert 0 < line["train/entropy"] <= math.log(400)


def test_micro_batches_when_they_are_small_give_the_same_run(run: Any, rl_plain: dict[str, Any]) -> None:
    # Act
    whole = read_metrics(run())
    split = read_metrics(run(run={"name": "split"}, actor={"mb_spec": {"max_tokens_per_mb": 60}}))

    # Assert
    for a, b in zip(whole, split, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)


def test_tensorboard_when_named_writes_events(run: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Act
    path = run(trackers=[{"name": "tensorboard"}])

    # Assert
    events = EventAccumulator(str(next((path / "tensorboard").rglob("events.*")).parent)).Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2]
    assert scalars[0].value == pytest.approx(read_metrics(path)[0]["train/loss"], abs=1e-6)


def test_weight_update_when_by_disk_equals_memory(run: Any) -> None:
    # Act
    memory = read_metrics(run())
    disk = read_metrics(run(run={"name": "disk"}, actor={"weight_update": {"type": "disk"}}))

    # Assert
    assert [line["rollout/reward"] for line in memory] == [line["rollout/reward"] for line in disk]


def test_environment_and_config_when_run_are_recorded(run: Any) -> None:
    path = run()

    assert json.loads((path / "environment.json").read_text())["earlier"] == []
    assert "arithmetic" in (path / "config.yaml").read_text()


def test_resume_when_asynchronous_plays_rows_under_way_with_the_restored_weights(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange: stop after a step later than the staleness bound, with rows of the next ones under way.
    rl_plain |= {"total_train_steps": 3, "checkpoint": {"keep_best": 0, "save_final": False, "freq_steps": 1}}
    rl_plain["rollout"]["max_head_offpolicyness"] = 1
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    train(load_run_config(path, []))

    # Act
    done = train(load_run_config(path, ["total_train_steps=5"]), resume="must")

    # Assert
    assert [line["step"] for line in read_metrics(done.path)] == [1, 2, 3, 4, 5]
    assert read_metrics(done.path)[3]["rollout/version_lag_max"] == 0


def test_train_when_it_evaluates_counts_the_tokens_of_each_apart(run: Any) -> None:
    # Act
    path = run(evaluation={"freq_steps": 1, "at_end": False})

    # Assert: two groups of four in a step, six held-out rows.
    for line in read_metrics(path):
        assert line["engine/finished"] == 8
        assert line["eval/engine/finished"] == 6
