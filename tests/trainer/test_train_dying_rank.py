"""A rank that dies ends the whole run, soon, and its error is the one that is shown first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import HERE, environment, read_metrics, write_yaml


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "own_error", "root_cause"),
    [
        ("raises", "rank 1: RuntimeError: this rank breaks", "RuntimeError: this rank breaks"),
        ("killed", None, "Signal 9 (SIGKILL)"),
    ],
)
def test_train_when_a_rank_dies_expected_all_end_and_its_error_first(
    death: str, own_error: str | None, root_cause: str, sft_plain: dict[str, Any], tmp_path: Path
) -> None:
    path = write_yaml(tmp_path / "run.yaml", {**sft_plain, "evaluation": {}})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    # A rank that waits for the dead one for ever would run into the time-out.
    run = subprocess.run(
        [*command, str(HERE / "dying_rank.py"), "train", str(path), "actor.backend=fsdp:d2"],
        capture_output=True,
        text=True,
        env={**environment(), "TEST_DEATH": death},
        timeout=500,
        check=False,
    )

    assert run.returncode == 1
    assert [line["step"] for line in read_metrics(tmp_path / "runs" / "sft")] == [1]
    if own_error is not None:
        first, other = run.stderr.index(own_error), run.stderr.find("rank 0: ")
        assert other == -1 or first < other
    # torchrun's summary: the dead rank, and what it said.
    summary = run.stderr.split("Root Cause", 1)[1]
    assert "rank      : 1" in summary
    assert root_cause in summary
