"""What a training run says about its episodes, and what it leaves when it is interrupted in the middle of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainer_harness import areal, read_metrics, start_areal, wait_until, write_yaml

OUTCOMES = ("accepted", "rejected", "failed", "cancelled")


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_metrics_when_episodes_end_in_every_way_count_each_of_them_once(
    rl_plain: dict[str, Any], tmp_path: Path, bound: int
) -> None:
    # Arrange: of the 4 x 4 episodes of a step, four are rejected, and two fail (on average).
    rl_plain["workflow"] = {"name": "trainer_workflows:MixedWorkflow"}
    rl_plain["rollout"] |= {"max_retries": 1, "max_failure_rate": 1.0, "max_head_offpolicyness": bound}
    rl_plain["train_dataset"]["batch_size"] = 4
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    done = areal("train", path)

    # Assert
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(tmp_path / "runs" / "rl") if "rollout/accepted" in line]
    assert len(lines) == 3
    for line in lines:
        counts = {outcome: line[f"rollout/{outcome}"] for outcome in OUTCOMES}
        groups = 4 + line["rollout/stale_groups"] + line["rollout/incomplete_groups"]
        assert sum(counts.values()) == 4 * groups
        assert counts["rejected"] == line["rollout/rejected/workflow"] == groups
        assert line["rollout/retries"] == counts["failed"]
    assert sum(line["rollout/failed"] for line in lines) >= 1
    trained = [json.loads(line) for line in _read_trajectories(tmp_path / "runs" / "rl")]
    accepted = sum(line["rollout/accepted"] for line in lines)
    assert sum(record.get("outcome") == "accepted" and record["split"] == "train" for record in trained) == accepted


def _read_trajectories(run: Path) -> list[str]:
    return [line for path in sorted((run / "trajectories").glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_train_when_interrupted_during_a_rollout_leaves_no_process(
    rl_plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    # Arrange: the reward's processes hang in the middle of the first rollout.
    mark = tmp_path / "mark"
    monkeypatch.setenv("TRAINER_TEST_MARK", str(mark))
    rl_plain["reward"] = {"name": "trainer_rewards:marking_hang_reward_fn", "timeout": 3600, "max_workers": 2}
    rl_plain["rollout"]["max_head_offpolicyness"] = bound
    process = start_areal("train", write_yaml(tmp_path / "run.yaml", rl_plain))
    wait_until(mark.exists, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2, "the reward runs in processes of its own"

    # Act
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)

    # Assert
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    state = json.loads((tmp_path / "runs" / "rl" / "state.json").read_text())
    assert state["status"] == "interrupted"
