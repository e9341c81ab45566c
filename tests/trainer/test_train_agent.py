"""`areal train` with an agent as its workflow, end to end on a tiny random model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import HERE, areal, read_metrics, weights, write_yaml

from areal_core.api.load import load_run_config
from areal_core.runs.run_dir import iter_trajectories
from areal_core.trainer.run import train


@pytest.fixture(autouse=True)
def _agents_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("export", ["concat", "individual"])
def test_train_when_workflow_is_an_agent_trains_on_what_was_sampled(
    rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path, export: str
) -> None:
    # Arrange
    rl_plain["workflow"] = {
        "name": "trainer_agents:AskingAgent",
        "agent": {"export": export, "turn_discount": 0.5},
    }
    rl_plain["total_train_steps"] = 2
    rl_plain["actor"]["reward_norm"] = None
    rl_plain["evaluation"] = {"at_start": False, "at_end": True, "limit": 2}
    rl_plain["checkpoint"]["save_final"] = True
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])

    # Act
    run = train(config).path

    # Assert: trainer and sampler see the same tokens, or their log-probs would differ
    metrics = [line for line in read_metrics(run) if "train/loss" in line]
    assert len(metrics) == 2
    for line in metrics:
        assert math.isfinite(line["train/loss"]) and line["train/grad_norm"] > 0
        assert line["train/logprob_gap"] < 1e-5 and abs(line["train/ratio"] - 1) < 1e-5
        assert line["rollout/agent/completions"] == 8 * 4 and line["rollout/agent/dropped_choices"] >= 8
        assert line["rollout/accepted"] == 8 and line["rollout/trained_tokens"] > 0
    assert metrics[-1]["eval/agent/completions"] == 2 * 4
    before, after = weights(tiny_model), weights(run / "weights" / "final")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    shown = [row for row in iter_trajectories(run) if row.get("split", "train") == "train"]
    per_episode = {"individual": 3, "concat": 1}[export]
    assert len(shown) >= 2 * 8 * per_episode and all(row["completion"] for row in shown)


def test_train_when_an_agent_sets_another_temperature_fails_and_names_the_field(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    rl_plain["workflow"] = {"name": "trainer_agents:NoisyAgent"}
    del rl_plain["reward"]  # an agent may score by itself
    rl_plain["rollout"]["max_retries"] = 0

    result = areal("train", write_yaml(tmp_path / "run.yaml", rl_plain))

    assert result.returncode == 1
    assert "temperature: training samples with 1.0" in result.stderr
    assert "workflow.agent.sampling_conflicts" in result.stderr
