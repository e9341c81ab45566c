"""The configurations of every algorithm, and the training of the main ones: the reward rises in 30 steps."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.cli.main import run
from areal_core.plugins.manager import get_plugin_manager

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.yaml"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("task", ["algorithms", "gsm8k"])
def test_configurations_when_listed_are_there_for_every_algorithm(task: str) -> None:
    names = {entry.registration.name for entry in get_plugin_manager().registrations("areal_algorithms")}

    assert len(names) >= 13
    assert names - {path.stem for path in (EXAMPLES / task).glob("*.yaml")} == set()


@pytest.mark.parametrize("task", ["algorithms", "gsm8k"])
@pytest.mark.parametrize("name", NAMES)
def test_configuration_when_checked_is_valid(
    name: str, task: str, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))  # examples.algorithms.rewards

    code = run(["config", "check", str(EXAMPLES / task / f"{name}.yaml"), f"actor.path={model_folder}"])

    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert f"algorithm.name: {name}@areal-core" in captured.out


def test_boxed_reward_when_called_wants_exactly_one_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.gsm8k.rewards import boxed_reward_fn

    assert boxed_reward_fn("", r"so \boxed{7}", [], []) == 1.0
    assert boxed_reward_fn("", r"\boxed{7} or \boxed{8}", [], []) == 0.0
    assert boxed_reward_fn("", "7", [], []) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "dapo", "rloo"])
def test_algorithm_when_trained_for_30_steps_raises_the_reward(
    name: str, start_model: Path, run_example: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_example(
        name, "--sft", start_model, "--runs", tmp_path / "runs", "--out", tmp_path / "curves", "--require-rise", 0.1
    )

    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "curves" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    rewards = [float(row["reward"]) for row in rows if row["reward"]]
    held_out = [float(row["held_out"]) for row in rows if row["held_out"]]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert held_out[-1] > held_out[0] + 0.1
