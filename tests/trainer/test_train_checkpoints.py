"""Checkpoints of whole runs: in the background, on a full disk, over a crash, and on another number of ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import (
    areal,
    environment,
    read_metrics,
    torchrun,
    untimed,
    wait_for_end,
    wait_until,
    weights,
    write_yaml,
)

from areal_core.api.load import load_run_config
from areal_core.errors import ArealError, BadInputError
from areal_core.runs.run_dir import list_checkpoints
from areal_core.trainer.run import train
from areal_fsdp import hf_folder


def assert_equal_weights(found: Path, expected: Path) -> None:
    one, other = weights(found / "weights" / "final"), weights(expected / "weights" / "final")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def run(sft_plain: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Train with overrides; returns the run directory."""
    sft_plain["evaluation"] = {"at_end": False}
    path = write_yaml(tmp_path / "run.yaml", sft_plain)

    def start(name: str, *overrides: str, resume: Any = "never") -> Path:
        return train(load_run_config(path, [f"run.name={name}", *overrides]), resume=resume).path

    return start


def test_train_when_saving_in_background_equals_saving_in_foreground(run: Callable[..., Path]) -> None:
    plain = run("plain", "checkpoint.freq_steps=1")

    background = run("background", "checkpoint.freq_steps=1", "checkpoint.async_save=true", "checkpoint.keep_last=9")

    assert untimed(read_metrics(background)) == untimed(read_metrics(plain))
    assert_equal_weights(background, plain)
    assert [step for step, _ in list_checkpoints(background)] == [1, 2, 3, 4]
    assert [p.name for p in (background / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_resume_when_saved_in_background_equals_uninterrupted_run(run: Callable[..., Path]) -> None:
    straight = run("straight")
    run("broken", "checkpoint.async_save=true", "total_train_steps=2")

    broken = run("broken", "checkpoint.async_save=true", resume="must")

    assert_equal_weights(broken, straight)


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_train_when_disk_fills_up_fails_clearly_and_resumes_from_the_last_checkpoint(
    async_save: str, run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrange: room for one checkpoint, then none.
    straight = run("straight")
    check_empty = hf_folder.check_empty

    def plant(path: Path) -> None:
        check_empty(path)
        if "step-000001" not in str(path):
            path.mkdir()
            (path / "__0_0.distcp").symlink_to("/dev/full")

    # Act
    with monkeypatch.context() as patch:
        patch.setattr(hf_folder, "check_empty", plant)
        with pytest.raises(
            ArealError, match=r"step 2 could not be written.*No space left.*step-000001 is the last"
        ) as e:
            run("broken", "checkpoint.freq_steps=1", f"checkpoint.async_save={async_save}")

    # Assert
    assert not isinstance(e.value, BadInputError)
    folder = tmp_path / "runs" / "broken"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert_equal_weights(run("broken", "checkpoint.freq_steps=1", resume="must"), straight)


#: A run whose second checkpoint never gets further than the first tensor of its file.
_CRASHING = """
import sys
from areal_fsdp import save_process

hook = '''
import os, threading
from torch.distributed.checkpoint import filesystem
write_item, files = filesystem._write_item, set()
def hooked(transforms, stream, *rest):
    result = write_item(transforms, stream, *rest)
    files.add(stream.name)
    if len(files) == 2:
        stream.flush()
        with open({marker!r} + '.part', 'w') as file:
            file.write(str(os.getpid()))
        os.rename(file.name, {marker!r})
        threading.Event().wait()
    return result
filesystem._write_item = hooked
'''.format(marker=sys.argv[1])
start, call, rest = save_process._PROGRAM.rpartition("main(")
save_process._PROGRAM = start + hook + call + rest
from areal_core.cli.main import run
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.slow
def test_resume_when_killed_within_a_background_write_equals_uninterrupted_run(
    sft_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    sft_plain["checkpoint"] = {"freq_steps": 1, "async_save": True, "keep_best": 0}
    path = write_yaml(tmp_path / "run.yaml", sft_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"
    assert areal("train", path, "run.name=straight").returncode == 0

    # Act: the second checkpoint is never finished.
    process = subprocess.Popen(
        [sys.executable, "-c", _CRASHING, str(tmp_path / "writing"), "train", str(path), "run.name=broken"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    wait_until(lambda: (tmp_path / "writing").exists(), process)
    writer = int((tmp_path / "writing").read_text())
    process.kill()
    process.wait()
    wait_for_end(writer)
    left = [step for step, _ in list_checkpoints(broken)]
    resumed = areal("train", path, "run.name=broken", "--resume", "must")

    # Assert
    assert left == [1]
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_weights(broken, straight)
    assert untimed(read_metrics(broken)) == untimed(read_metrics(straight))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_resume_when_the_number_of_ranks_changes_equals_uninterrupted_run(
    first: int, second: int, sft_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    sft_plain["actor"]["optimizer"] |= {"lr_scheduler_type": "linear", "lr": 1e-3}
    sft_plain["checkpoint"] = {"async_save": True, "keep_best": 0}
    path = write_yaml(tmp_path / "run.yaml", sft_plain)

    def start(ranks: int, name: str, *arguments: str) -> Any:
        words = ["train", path, f"run.name={name}", f"actor.backend=fsdp:d{ranks}", *arguments]
        return torchrun(ranks, *words) if ranks > 1 else areal(*words)

    straight = start(1, "straight")

    # Act: the schedule is that of four steps; SIGTERM would stop it half-way, a shorter run would not be the same.
    begun = start(first, "moved", "checkpoint.freq_steps=2", "checkpoint.keep_last=2")
    moved = tmp_path / "runs" / "moved"
    last = moved / "checkpoints" / "step-000004"
    last.rename(tmp_path / "put-away")
    resumed = start(second, "moved", "--resume", "must")

    # Assert
    for result in (straight, begun, resumed):
        assert result.returncode == 0, result.stderr
    expected, found = (
        weights(tmp_path / "runs" / "straight" / "weights" / "final"),
        weights(moved / "weights" / "final"),
    )
    for name, value in expected.items():
        # AdamW turns a gradient near 0 into a step of either sign: a few elements may differ by more.
        difference = (found[name] - value).abs()
        assert (difference > 1e-5).float().mean() < 0.01, name
        assert difference.max() < 4e-3, name
    lines, others = read_metrics(moved), read_metrics(tmp_path / "runs" / "straight")
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        if "train/loss" in other:
            assert line["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
            assert line["train/lr"] == pytest.approx(other["train/lr"])


def test_resume_when_another_key_changed_is_refused(run: Callable[..., Path]) -> None:
    run("once", "total_train_steps=1")

    with pytest.raises(BadInputError, match=r"actor\.mb_spec\.max_tokens_per_mb"):
        run("once", "actor.mb_spec.max_tokens_per_mb=64", resume="auto")
