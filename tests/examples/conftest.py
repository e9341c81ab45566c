"""What the tests of the examples share: a model to start from, trained once for all workers of a test run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from trainer_harness import areal, environment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model before GRPO, in fewer steps."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    root = root / "start-model"
    root.mkdir(exist_ok=True)
    final = root / "sft-0" / "weights" / "final"
    with FileLock(root / "lock"):
        if not final.is_dir():
            sft = ["train", ROOT / "examples" / "quickstart" / "sft.yaml", f"run.root={root}", "total_train_steps=240"]
            for command in (["arithmetic", "init", root / "model"], sft):
                done = areal(*command, timeout=1800)
                assert done.returncode == 0, done.stderr
    return final


@pytest.fixture(scope="session")
def run_example() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run examples/algorithms/run.py as a user does."""

    def run(*arguments: object, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "examples" / "algorithms" / "run.py", *arguments]
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=timeout,
            check=False,
        )

    return run
