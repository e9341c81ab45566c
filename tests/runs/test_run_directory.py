from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.document import read_document
from areal_core.errors import BadInputError
from areal_core.runs.metrics import best_metric, read_metrics
from areal_core.runs.run_dir import RunDirectory, config_differences, iter_trajectories, list_checkpoints

Open = Callable[..., RunDirectory]

_CHILD = """
import os, signal, sys
from areal_core.runs.files import temporary_beside
from areal_core.runs.run_dir import RunDirectory
run = RunDirectory.open({config!r}, {path!r})
{body}
"""


def run_child(path: Path, config: dict[str, Any], body: str, **kwargs: Any) -> subprocess.Popen[str]:
    code = _CHILD.format(config=config, path=str(path), body=body)
    return subprocess.Popen([sys.executable, "-c", code], text=True, **kwargs)


# ------------------------------------------------------------------------------------------------------- opening


def test_open_when_fresh_then_everything_of_a_run_exists(open_run: Open, config: dict[str, Any]) -> None:
    run = open_run()

    assert {"trajectories", "checkpoints", "weights", "logs"} <= {p.name for p in run.path.iterdir() if p.is_dir()}
    assert read_document(run.path / "config.yaml").tree == config
    assert run.read_state()["status"] == "running"
    assert not run.resumed and run.latest_checkpoint is None


def test_open_when_secrets_are_around_then_environment_json_has_none(
    open_run: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(
        sys, "argv", ["areal", "train", "--api-key", "hunter2", "wandb.api_key=hunter2", "gconfig.max_new_tokens=8"]
    )

    text = (open_run().path / "environment.json").read_text()

    stored = json.loads(text)
    assert "hunter2" not in text
    assert stored["command"] == ["areal", "train", "--api-key", "***", "wandb.api_key=***", "gconfig.max_new_tokens=8"]
    assert stored["environment"]["OMP_NUM_THREADS"] == "3"
    assert stored["versions"]["areal-core"] and stored["python"] and stored["cpu_count"]


def test_open_when_never_and_a_run_is_there_then_error_names_resume_auto(open_run: Open) -> None:
    first = open_run()
    first.log_metrics(1, {"a": 1.0})
    first.close()

    with pytest.raises(BadInputError, match=r"--resume auto.*another run\.name"):
        open_run("never")

    assert len(read_metrics(first.path)) == 1


def test_open_when_never_and_nothing_was_recorded_then_it_starts(open_run: Open) -> None:
    open_run().close()

    assert not open_run("never").resumed


def test_open_when_must_and_no_checkpoint_then_error_and_nothing_is_made(open_run: Open, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no checkpoint to resume from"):
        open_run("must")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_open_when_there_is_a_checkpoint_then_it_resumes(
    open_run: Open, checkpoint: Callable[[Path, int], Path], resume: str
) -> None:
    first = open_run()
    first.log_metrics(1, {"a": 1.0})
    checkpoint(first.path, 1)
    checkpoint(first.path, 12)
    (first.path / "checkpoints" / ".tmp-step-000099").mkdir()
    first.write_state({"best": [[1, 0.5]]})
    first.close()

    run = open_run(resume)

    assert run.resumed
    assert run.latest_checkpoint == (12, run.path / "checkpoints" / "step-000012")
    assert [step for step, _ in list_checkpoints(run.path)] == [1, 12]
    assert not (run.path / "checkpoints" / ".tmp-step-000099").exists()
    assert run.read_state()["best"] == [[1, 0.5]]
    assert len(read_metrics(run.path)) == 1
    assert len(json.loads((run.path / "environment.json").read_text())["earlier"]) == 1


def test_open_when_auto_without_a_checkpoint_then_earlier_metrics_go(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    first = open_run()
    first.trajectories.write(1, trajectory())
    first.log_metrics(1, {"a": 1.0})
    first.write_state({"step": 1})
    first.close()

    run = open_run("auto", seed=2)

    assert read_metrics(run.path) == []
    assert list(iter_trajectories(run.path)) == []
    assert "step" not in run.read_state()
    assert read_document(run.path / "config.yaml").tree["seed"] == 2


def test_open_when_the_config_differs_on_resume_then_error_lists_keys_and_both_values(
    open_run: Open, checkpoint: Callable[[Path, int], Path]
) -> None:
    first = open_run()
    checkpoint(first.path, 3)
    first.close()
    before = (first.path / "config.yaml").read_text()

    with pytest.raises(BadInputError) as caught:
        open_run(actor={"path": "model", "optimizer": {"lr": 3e-05}}, ref={"path": "other"}, gconfig={"n_samples": 8})

    message = str(caught.value)
    assert "actor.optimizer.lr: 1e-05 in the run, 3e-05 now" in message
    assert 'ref.path: null in the run, "other" now' in message
    assert "gconfig.stop: [] in the run, null now" in message
    assert message.count(" in the run, ") == 3
    assert (first.path / "config.yaml").read_text() == before
    assert open_run().resumed  # the failed try gave the lock back


def test_open_when_only_free_keys_differ_then_it_resumes(
    open_run: Open, checkpoint: Callable[[Path, int], Path], config: dict[str, Any]
) -> None:
    first = open_run()
    checkpoint(first.path, 3)
    first.close()

    run = open_run(
        "must",
        total_train_steps=20,
        total_train_epochs=2,
        trackers=[{"name": "tensorboard"}],
        evaluation={"freq_steps": 1},
        checkpoint={"metric": "other", "mode": "min"},
        run={"name": "a", "root": "elsewhere"},
        num_threads=2,
    )

    assert read_document(run.path / "config.yaml").tree["total_train_steps"] == 20


def test_config_differences_when_a_key_only_starts_like_a_free_one_then_it_counts() -> None:
    assert config_differences({"checkpointing": 1}, {"checkpointing": 2}) == {"checkpointing": (1, 2)}
    assert config_differences({"run": {"rooted": 1}}, {"run": {"rooted": 2}}) == {"run.rooted": (1, 2)}


def test_config_differences_when_only_a_mesh_changed_then_none() -> None:
    before = {"actor": {"backend": "fsdp"}, "rollout": {"backend": "vllm:d2"}, "critic": {"backend": "fsdp:d1"}}
    now = {"actor": {"backend": "fsdp:d4t2"}, "rollout": {"backend": "vllm:d4"}, "critic": {"backend": "fsdp:d8"}}

    assert config_differences(before, now) == {}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"actor": {"backend": "fsdp:d2"}}, {"actor": {"backend": "megatron:d2"}}),
        ({"actor": {"backend": "fsdp:d2"}}, {"actor": {"backend": None}}),
        ({"other": {"backend": "fsdp:d2"}}, {"other": {"backend": "fsdp:d4"}}),
    ],
)
def test_config_differences_when_an_engine_changed_then_it_counts(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert len(config_differences(before, now)) == 1


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_open_when_the_path_is_a_file_then_error_names_it(open_run: Open, tmp_path: Path, resume: str) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(BadInputError, match=r"file: this is a file"):
        open_run(resume, tmp_path / "file")
    with pytest.raises(BadInputError, match=r"run directory .*below: cannot read and write"):
        open_run(resume, tmp_path / "file" / "below")


def test_open_when_the_place_cannot_be_written_then_error_names_it(open_run: Open) -> None:
    with pytest.raises(BadInputError, match=r"/proc/areal-test: cannot read and write"):
        open_run(path=Path("/proc/areal-test"))


def test_open_when_a_sub_folder_cannot_be_written_then_error_names_it(
    open_run: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full_disk(self: Path, data: bytes) -> int:
        if "logs" in str(self):
            raise OSError(28, "No space left on device", str(self))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)

    with pytest.raises(BadInputError, match=r"cannot read and write .*logs.*: No space left on device"):
        open_run()


def test_open_when_config_yaml_is_damaged_then_error_names_it(
    open_run: Open, checkpoint: Callable[[Path, int], Path]
) -> None:
    first = open_run()
    checkpoint(first.path, 3)
    first.close()
    (first.path / "config.yaml").write_text("a: [1")

    with pytest.raises(BadInputError, match=r"config\.yaml"):
        open_run()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_read_state_when_damaged_then_error_names_it(open_run: Open, text: str) -> None:
    run = open_run()
    (run.path / "state.json").write_text(text)

    with pytest.raises(BadInputError, match=r"state\.json.*Remove the file"):
        run.read_state()


# --------------------------------------------------------------------------------------------------------- lock


def test_open_when_this_process_holds_it_then_error(open_run: Open) -> None:
    run = open_run()

    with pytest.raises(BadInputError, match="this process is using this run already"):
        open_run()

    run.close()
    open_run()


def test_open_when_a_live_process_holds_it_then_error_names_its_pid(
    open_run: Open, tmp_path: Path, config: dict[str, Any]
) -> None:
    child = run_child(
        tmp_path / "run",
        config,
        "print('open', flush=True); sys.stdin.read()",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "open\n"

        with pytest.raises(BadInputError, match=rf"process {child.pid} on .* is using this run"):
            open_run()
    finally:
        child.stdin.close()
        child.wait(timeout=60)
        child.stdout.close()
    open_run()  # it ended without closing: its lock is stale now


def test_open_when_a_pid_was_reused_then_the_lock_is_taken_over(open_run: Open, tmp_path: Path) -> None:
    first = open_run()
    first.close()
    owner = {"pid": 1, "start_time": 12.5, "host": __import__("platform").node()}
    (first.path / ".lock").write_text(json.dumps(owner))

    open_run()


def test_open_when_another_host_holds_it_then_error_says_what_to_remove(open_run: Open) -> None:
    first = open_run()
    first.close()
    (first.path / ".lock").write_text(json.dumps({"pid": 1, "start_time": 1.0, "host": "far-away"}))

    with pytest.raises(BadInputError, match=r"on far-away .* remove .*\.lock"):
        open_run()


def test_open_when_the_last_process_was_killed_in_a_write_then_leftovers_go(
    open_run: Open, tmp_path: Path, config: dict[str, Any]
) -> None:
    body = """
run.log_metrics(1, {"a": 1.0})
run.trajectories.write(1, None, prompt="p")
run.trajectories.flush()
os.mkdir(run.path / "checkpoints" / "step-000001")
for place in (run.path / "state.json", run.path / "weights" / "final", run.path / "trajectories" / "x"):
    temporary_beside(place).write_text("half")
with open(run.path / "metrics.jsonl", "a") as f: f.write('{"step":2,"a":')
with open(run.path / "trajectories" / "train-00000.jsonl", "a") as f: f.write('{"step":2,"pro')
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "run"
    assert run_child(path, config, body).wait(timeout=60) == -9
    assert len(list(path.rglob(".tmp-*"))) == 3
    assert read_metrics(path) == [{"step": 1, "time": pytest.approx(1e9, rel=10), "a": 1.0}]

    run = open_run("must")
    run.log_metrics(2, {"a": 2.0})
    run.trajectories.write(2, None, prompt="q")
    run.close()

    assert list(path.rglob(".tmp-*")) == []
    assert [line["a"] for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())] == [1.0, 2.0]
    assert [line["prompt"] for line in iter_trajectories(path)] == ["p", "q"]


# ------------------------------------------------------------------------------------------------------ metrics


def test_log_metrics_when_not_finite_then_the_line_is_valid_json_with_null(open_run: Open) -> None:
    import numpy as np
    import torch

    run = open_run()

    run.log_metrics(1, {"a": float("nan"), "b": float("inf"), "c": np.float32(0.5), "d": torch.tensor(2), "e": True})

    def reject(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    (line,) = (run.path / "metrics.jsonl").read_text().splitlines()
    stored = json.loads(line, parse_constant=reject)
    assert {k: stored[k] for k in "abcde"} == {"a": None, "b": None, "c": 0.5, "d": 2, "e": True}
    assert stored["step"] == 1 and stored["time"] > 1e9


def test_truncate_when_resuming_then_later_steps_and_torn_lines_go(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    run = open_run()
    for step in range(1, 5):
        run.trajectories.write(step, trajectory(), split="train")
        run.trajectories.write(step, trajectory(), split="eval")
        run.log_metrics(step, {"a": float(step)})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "a"')

    run.truncate(2)
    run.log_metrics(3, {"a": 30.0})
    run.trajectories.write(3, trajectory(), split="train")
    run.close()

    assert [row["a"] for row in read_metrics(run.path)] == [1.0, 2.0, 30.0]
    assert [(t["step"], t["split"]) for t in iter_trajectories(run.path)] == [
        (1, "eval"),
        (2, "eval"),
        (1, "train"),
        (2, "train"),
        (3, "train"),
    ]


def test_read_metrics_when_a_step_has_two_lines_then_they_are_merged(open_run: Open) -> None:
    run = open_run()
    run.log_metrics(2, {"a": 1.0, "b": 1.0})
    run.log_metrics(1, {"a": 0.0})
    run.log_metrics(2, {"b": 2.0, "eval/reward": 3.0})

    rows = read_metrics(run.path)

    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[1]["a"], rows[1]["b"], rows[1]["eval/reward"]) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("damage", ['{"step": 1', "[1]", "no json"])
def test_read_metrics_when_a_middle_line_is_damaged_then_error_names_the_line(open_run: Open, damage: str) -> None:
    run = open_run()
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n' + damage + '\n{"step": 2}\n')

    with pytest.raises(BadInputError, match=r"metrics\.jsonl:2"):
        read_metrics(run.path)


def test_best_metric_when_ties_and_gaps_then_the_first_best_counts() -> None:
    rows = [{"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": 2.0}, {"step": 5, "x": 2.0}]

    assert best_metric(rows, "x", "max") == (4, 2.0)
    assert best_metric(rows, "x", "min") == (1, 1.0)
    assert best_metric(rows, "y", "max") is None


# -------------------------------------------------------------------------------------------------------- state


def test_write_state_when_the_caller_gives_its_own_keys_then_status_stays(open_run: Open) -> None:
    run = open_run()
    run.set_status("failed", ValueError("no"))

    run.write_state({"step": 3, "checkpoint": "step-000003"})

    state = run.read_state()
    assert (state["status"], state["error"], state["step"]) == ("failed", "no", 3)


def test_close_when_called_twice_then_nothing_happens(open_run: Open) -> None:
    run = open_run()

    run.close()
    run.close()

    assert not (run.path / ".lock").exists()
