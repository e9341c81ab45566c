"""Rewards in a training run: what goes wrong in them, what their names are for, what is written of each episode."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_harness import HERE, read_metrics, write_yaml
from trainer_rewards import MISBEHAVIOUR
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_core.api.load import load_run_config
from areal_core.runs.trajectories import iter_trajectories
from areal_core.trainer.run import train


@pytest.fixture(autouse=True)
def _rewards_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def run(plain: dict[str, Any], tmp_path: Path) -> Path:
    return train(load_run_config(write_yaml(tmp_path / "run.yaml", plain), [])).path


def test_train_when_rewards_misbehave_in_every_way_counts_each_and_says_of_which_episode(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange: one step over all rows; two samples each
    rows = len(MISBEHAVIOUR) + 2
    rl_plain |= {
        "total_train_steps": 1,
        "train_dataset": {"name": "trainer_rewards:misbehaving_dataset", "batch_size": rows, "shuffle": False},
        "reward": {"name": "trainer_rewards:by_column_reward_fn", "timeout": 3.0, "max_workers": 2},
    }
    rl_plain["gconfig"] = {"n_samples": 2, "max_new_tokens": 4}
    rl_plain["actor"]["reward_norm"] = None

    # Act
    path = run(rl_plain, tmp_path)

    # Assert
    (line,) = read_metrics(path)
    expected = Counter(kind for kind in MISBEHAVIOUR.values() for _ in range(2))
    prefix, rejected = "reward/errors/", "rollout/rejected/reward_"
    assert {k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix)} == expected
    assert {k.removeprefix(rejected): v for k, v in line.items() if k.startswith(rejected)} == expected
    assert (line["rollout/accepted"], line["rollout/rejected"], line["rollout/failed"]) == (4, 2 * rows - 4, 0)
    assert line["reward/calls"] == 2 * rows

    episodes = list(iter_trajectories(path))
    assert len(episodes) == 2 * rows
    assert Counter(e["reason"] for e in episodes if e["outcome"] == "rejected") == {
        f"reward_{kind}": count for kind, count in expected.items()
    }
    for episode in episodes:
        if episode["outcome"] == "accepted":
            continue
        assert episode["error"].startswith("RewardError: reward 'trainer_rewards:by_column_reward_fn' ")
        assert episode["uid"] and episode["sample"] in (0, 1) and episode["attempts"] == 1
        assert episode["seconds"] > 0
    assert len({(e["uid"], e["sample"]) for e in episodes}) == 2 * rows


def test_train_when_rewards_are_named_logs_writes_and_charts_each(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: `spoilt` is NaN for one row in four, which counts 0 there
    rl_plain |= {
        "total_train_steps": 2,
        "train_dataset": {"name": "trainer_rewards:half_misbehaving_dataset", "batch_size": 4},
        "valid_dataset": {"name": "trainer_rewards:half_misbehaving_dataset"},
        "evaluation": {"at_start": True, "at_end": False},
        "rewards": {
            "even": {"name": "trainer_rewards:even_reward_fn"},
            "spoilt": {
                "name": "trainer_rewards:by_column_reward_fn",
                "weight": -0.5,
                "timeout": 60.0,
                "on_error": "zero",
            },
        },
    }
    del rl_plain["reward"]

    # Act
    path = run(rl_plain, tmp_path)

    # Assert
    start, *steps = read_metrics(path)
    assert start["eval/reward"] == pytest.approx(start["eval/reward/even"] - 0.5 * start["eval/reward/spoilt"])
    assert (start["eval/reward/spoilt/calls"], start["eval/reward/spoilt/errors/nan"]) == (4, 1)
    for number, line in enumerate(steps, 1):
        episodes = [e for e in iter_trajectories(path, split="train") if e["step"] == number]
        assert len(episodes) == line["rollout/accepted"] == 16
        for label in ("even", "spoilt"):
            values = [e["rewards"][label] for e in episodes]
            assert line[f"rollout/reward/{label}"] == pytest.approx(np.mean(values))
            assert line[f"rollout/reward_std/{label}"] == pytest.approx(np.std(values))
            assert line[f"reward/{label}/calls"] == 16
        for episode in episodes:
            parts = episode["rewards"]
            ids = episode["input_ids"][episode["prompt_len"] :]
            assert parts["even"] == pytest.approx(sum(token % 2 == 0 for token in ids) / len(ids))
            assert parts["spoilt"] in (0.0, float(len(ids)))
            assert episode["reward"] == pytest.approx(parts["even"] - 0.5 * parts["spoilt"])
        assert line["reward/spoilt/errors/nan"] == 4
        assert sum(e["rewards"]["spoilt"] == 0.0 for e in episodes) == 4
    page = (path / "report.html").read_text()
    assert '"title":"Named rewards"' in page and "rollout/reward/even" in page and '"title":"Reward errors"' in page


def test_train_when_a_named_reward_fails_rejects_the_episode_by_its_label(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain |= {
        "total_train_steps": 1,
        "train_dataset": {"name": "trainer_rewards:half_misbehaving_dataset", "batch_size": 4},
        "rewards": {
            "even": {"name": "trainer_rewards:even_reward_fn"},
            "spoilt": {"name": "trainer_rewards:by_column_reward_fn", "timeout": 60.0},
        },
    }
    del rl_plain["reward"]

    # Act
    path = run(rl_plain, tmp_path)

    # Assert
    (line,) = read_metrics(path)
    assert line["rollout/rejected/reward_nan"] == line["reward/spoilt/errors/nan"] == 4
    assert line["rollout/accepted"] == 12
    rejected = [e for e in iter_trajectories(path) if e["outcome"] == "rejected"]
    assert {(e["reason"], e["error"]) for e in rejected} == {
        ("reward_nan", "RewardError: reward 'spoilt' returned NaN")
    }
    assert len({e["uid"] for e in rejected}) == 1


def test_trajectories_when_accepted_hold_all_of_the_episode(
    rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 1
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    # Act
    path = run(rl_plain, tmp_path)

    # Assert
    lines = list(iter_trajectories(path))
    assert len(lines) == 8
    for line in lines:
        start, length = line["prompt_len"], line["length"]
        assert 0 < start < length == len(line["input_ids"])
        ids = line["input_ids"]
        assert line["prompt"] == tokenizer.decode(ids[:start], skip_special_tokens=False)
        assert line["completion"] == tokenizer.decode(ids[start:], skip_special_tokens=True)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(line["logprobs"]), expected, rtol=0, atol=1e-4)
        assert line["loss_mask"] == [[0, start], [1, length - start]]
        assert line["versions"] == [[-1, start], [0, length - start]]
        assert (line["outcome"], line["reason"], line["error"], line["rewards"]) == ("accepted", None, None, {})
        assert (line["step"], line["split"], line["version"], line["attempts"]) == (1, "train", 0, 1)
        assert line["group_id"] == line["uid"]
        assert 0 < line["ttft"] <= line["latency"] <= line["seconds"]
    assert {line["sample"] for line in lines} == {0, 1, 2, 3}
