"""The examples of the trainers rw, dpo and distill, on models that SFT makes in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_harness import areal, read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trainers"


@pytest.mark.parametrize("name", ["rw", "dpo", "distill"])
def test_example_when_its_models_are_there_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    more = [f"{key}.path={folder}" for key in ("actor", "teacher") if key == "actor" or name == "distill"]

    checked = areal("config", "check", EXAMPLES / f"{name}.yaml", *more)

    assert checked.returncode == 0, checked.stderr
    assert f"trainer: {name}" in checked.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The quickstart's SFT model, in fewer steps, and a better one that goes on with careful demonstrations."""
    root = tmp_path_factory.mktemp("models")
    sft = ["train", ROOT / "examples" / "quickstart" / "sft.yaml", f"run.root={root}"]
    careful = ["train_dataset.arithmetic.sloppy=0", "train_dataset.arithmetic.no_format=0"]
    commands: list[list[Any]] = [
        ["arithmetic", "init", root / "model"],
        [*sft, "total_train_steps=240"],
        [
            *sft,
            "run.name=careful",
            "total_train_steps=60",
            f"actor.path={root}/sft-0/weights/final",
            "actor.init_from_scratch=false",
            "actor.optimizer.lr=1e-3",
            *careful,
        ],
    ]
    for command in commands:
        done = areal(*command, timeout=900)
        assert done.returncode == 0, done.stderr
    return {"actor": root / "sft-0" / "weights" / "final", "teacher": root / "careful" / "weights" / "final"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["rw", "dpo", "distill"])
def test_example_when_run_learns(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    # Arrange
    more = [f"{key}.path={path}" for key, path in models.items() if key == "actor" or name == "distill"]

    # Act
    done = areal("train", EXAMPLES / f"{name}.yaml", f"run.root={tmp_path}", *more, timeout=900)

    # Assert
    assert done.returncode == 0, done.stderr
    metrics = [line for line in read_metrics(tmp_path / f"{name}-0") if "eval/loss" in line]
    first, last = metrics[0], metrics[-1]
    if name == "rw":
        assert last["eval/accuracy"] > 0.9
    elif name == "dpo":
        # Before the first step the policy is the reference: compare with the first evaluation after it.
        assert last["eval/accuracy"] > 0.9
        assert last["eval/margin"] > metrics[1]["eval/margin"] > 0
    else:
        assert last["eval/loss"] < 0.25 * first["eval/loss"]
        assert last["eval/reward"] > first["eval/reward"] + 0.2
    assert (tmp_path / f"{name}-0" / "report.html").is_file()
