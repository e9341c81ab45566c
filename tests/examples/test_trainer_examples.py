"""The examples of the trainers sft, rw, dpo and distill: 30 steps from the quickstart's model, and what they leave."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_harness import areal, read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
NAMES = ("sft", "rw", "dpo", "distill")


@pytest.mark.parametrize("name", NAMES)
def test_example_when_its_models_are_there_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    more = [f"{key}.path={folder}" for key in ("actor", "teacher") if key == "actor" or name == "distill"]

    checked = areal("config", "check", EXAMPLES / f"{name}.yaml", *more)

    assert checked.returncode == 0, checked.stderr
    assert f"trainer: {name}" in checked.stdout


@pytest.fixture(scope="module")
def runs(
    start_model: Path,
    run_example: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of all four runs; distill's teacher is what sft made."""
    root = tmp_path_factory.mktemp("trainers")
    done = run_example(*NAMES, "--sft", start_model, "--runs", root, "--out", root / "curves", "--require-rise", 0.25)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", NAMES)
def test_example_when_run_for_30_steps_learns(name: str, runs: Path) -> None:
    metrics = [line for line in read_metrics(runs / name) if "eval/loss" in line]
    first, last = metrics[0], metrics[-1]
    assert last["eval/loss"] < 0.75 * first["eval/loss"]
    if name == "rw":
        assert last["eval/accuracy"] > max(0.85, first["eval/accuracy"])
    elif name == "dpo":
        # Before the first step the policy is the reference: compare with the first evaluation after it.
        assert last["eval/accuracy"] > 0.9
        assert last["eval/margin"] > metrics[1]["eval/margin"] > 0
    elif name == "distill":
        assert last["eval/loss"] < 0.25 * first["eval/loss"]
        assert last["eval/reward"] > first["eval/reward"] + 0.2
    assert (runs / name / "report.html").is_file()
