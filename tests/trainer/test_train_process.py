"""`areal train` whose sampler is a process of its own: it trains, ends well, resumes, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from trainer_harness import areal, read_metrics, start_areal, untimed, wait_until, weights, write_yaml

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def process_plain(rl_plain: dict[str, Any]) -> dict[str, Any]:
    rl_plain["rollout"] = {"backend": "local", "max_head_offpolicyness": 1, "local": {"process": True}}
    rl_plain["actor"]["use_decoupled_loss"] = True
    rl_plain["total_train_steps"] = 6
    rl_plain["checkpoint"] = {"freq_steps": 1, "keep_best": 0, "save_final": True}
    return rl_plain


def segments() -> set[str]:
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return {name for name in names if not name.startswith("sem.")}  # semaphores of whatever else runs here


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
def test_train_when_the_sampler_is_a_process_and_stopped_leaves_nothing_and_resumes(
    process_plain: dict[str, Any], tmp_path: Path, signum: signal.Signals
) -> None:
    # Arrange
    path, run = write_yaml(tmp_path / "run.yaml", process_plain), tmp_path / "runs" / "rl"
    before = segments()
    process = start_areal("train", path)
    wait_until(lambda: len(read_metrics(run)) >= 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    samplers = [child for child in children if "areal_local" in " ".join(child.cmdline())]

    # Act
    process.send_signal(signum)
    output, _ = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(children, timeout=30)
    resumed = areal("train", path, "--resume", "must")

    # Assert
    assert len(samplers) == 1
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), output
    assert "Traceback" not in output
    assert not alive
    assert resumed.returncode == 0, resumed.stderr
    assert segments() <= before
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(line["train/loss"]) for line in metrics)
    assert all(0 <= line["rollout/version_lag_max"] <= 1 for line in metrics)
    assert json.loads((run / "state.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_train_when_the_sampler_is_killed_goes_on_with_another(process_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    process_plain["rollout"]["max_head_offpolicyness"] = 0
    path, run = write_yaml(tmp_path / "run.yaml", process_plain), tmp_path / "runs" / "rl"
    process = start_areal("train", path)
    wait_until(lambda: len(read_metrics(run)) >= 2, process)
    (sampler,) = (c for c in psutil.Process(process.pid).children() if "areal_local" in " ".join(c.cmdline()))

    # Act
    sampler.kill()
    output, _ = process.communicate(timeout=240)

    # Assert
    assert process.returncode == 0, output
    assert f"the generation process {sampler.pid} was ended by SIGKILL" in output
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert sum(line["engine/restarts"] for line in metrics) == 1
    # The new one samples with the newest weights, or it would not agree with the trainer.
    assert all(line["train/logprob_gap"] < 1e-5 for line in metrics)


@pytest.mark.slow
def test_train_when_the_sampler_is_a_process_equals_a_thread_bitwise(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: synchronous, with an evaluation and stop strings.
    rl_plain["evaluation"] = {"freq_steps": 2, "at_end": True}
    rl_plain["gconfig"]["stop"] = ["7"]
    rl_plain["checkpoint"] = {"keep_best": 0, "save_final": True}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    runs = {}
    for mode, process in (("thread", "false"), ("process", "true")):
        done = areal("train", path, f"run.name={mode}", f"rollout.local.process={process}")
        assert done.returncode == 0, done.stderr
        runs[mode] = tmp_path / "runs" / mode

    # Assert
    found = [
        {k: v for k, v in line.items() if k.split("/")[-1] != "restarts"} for line in read_metrics(runs["process"])
    ]
    assert untimed(found) == untimed(read_metrics(runs["thread"]))
    one, two = (weights(run / "weights" / "final") for run in runs.values())
    assert all(torch.equal(one[name], two[name]) for name in one)
