"""Runs and trajectories that the tests of ``areal_core.runs`` write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.io_struct import Trajectory
from areal_core.runs.run_dir import RunDirectory


def make_trajectory(prompt: str = "2+2=", completion: str = "4", **fields: Any) -> Trajectory:
    """One character is one token."""
    n, m = len(prompt), len(completion)
    values: dict[str, Any] = {
        "input_ids": [ord(c) for c in prompt + completion],
        "loss_mask": [False] * n + [True] * m,
        "logprobs": [0.0] * n + [-0.25] * m,
        "versions": [-1] * n + [3] * m,
        "reward": 1.0,
        "group_id": "0-0",
    }
    return Trajectory(**(values | fields))


class CharTokenizer:
    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids)


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def config() -> dict[str, Any]:
    return {
        "trainer": "rl",
        "seed": 1,
        "total_train_steps": 10,
        "actor": {"path": "model", "optimizer": {"lr": 1e-05}},
        "gconfig": {"n_samples": 8, "stop": []},
        "ref": None,
        "checkpoint": {"metric": "eval/reward", "mode": "max"},
        "run": {"name": "a", "root": "runs"},
    }


@pytest.fixture
def open_run(tmp_path: Path, config: dict[str, Any]) -> Iterator[Callable[..., RunDirectory]]:
    """Opens run directories and closes them after the test."""
    opened: list[RunDirectory] = []

    def open_(resume: Any = "auto", path: Path | None = None, **changes: Any) -> RunDirectory:
        run = RunDirectory.open(config | changes, path or tmp_path / "run", resume)
        opened.append(run)
        return run

    yield open_
    for run in opened:
        run.close()


def add_checkpoint(path: Path, step: int) -> Path:
    folder = path / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint() -> Callable[[Path, int], Path]:
    return add_checkpoint
