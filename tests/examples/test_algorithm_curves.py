"""examples/algorithms/run.py: what it writes of a run, and what it refuses."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "algorithms"


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithm_curves", EXAMPLE / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curve_when_written_holds_every_step_and_is_a_picture(curves: ModuleType, tmp_path: Path) -> None:
    curves.write(tmp_path / "out", "grpo", [(1, 0.25), (2, 0.5)], {0: 0.1, 2: 0.75})

    with (tmp_path / "out" / "grpo.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["step", "reward", "held_out"],
            ["0", "", "0.1"],
            ["1", "0.25", ""],
            ["2", "0.5", "0.75"],
        ]
    picture = ElementTree.parse(tmp_path / "out" / "grpo.svg").getroot()
    (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 2
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nonsense"], "unknown: nonsense"), ([], "give names, or --all"), (["grpo", "--sft", "nowhere"], "no model in")],
)
def test_run_when_asked_for_what_is_not_there_says_so(
    curves: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])

    with pytest.raises(SystemExit) as caught:
        curves.main()

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_run_when_nothing_was_trained_makes_the_model_to_start_from_and_gives_sft_s_to_distill(
    curves: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Arrange
    commands: list[tuple[str, ...]] = []

    def areal(log: Path, *arguments: str) -> None:
        commands.append(arguments)
        options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        if arguments[0] == "train":
            run = Path(options["run.root"]) / options.get("run.name", "sft-0")
            (run / "weights" / "final").mkdir(parents=True)
            losses = [{"step": step, "train/loss": 1 / step, "eval/loss": 0.5, "time/step_s": 1.0} for step in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(curves, "areal", areal)
    monkeypatch.setattr(sys, "argv", ["run.py", "sft", "distill", "--require-rise", "0.4", "--steps", "2"])

    # Act
    code = curves.main()

    # Assert
    assert code == 0
    first = tmp_path / "runs" / "quickstart"
    assert commands[0] == ("arithmetic", "init", str(first / "model"))
    assert commands[1][1].endswith("examples/quickstart/sft.yaml") and f"run.root={first}" in commands[1]
    made = tmp_path / "runs" / "algorithms" / "run"
    assert f"actor.path={first / 'sft-0' / 'weights' / 'final'}" in commands[2]
    assert f"teacher.path={made / 'sft' / 'weights' / 'final'}" in commands[3]
    monkeypatch.setattr(sys, "argv", ["run.py", "sft", "--require-rise", "0.6"])
    assert curves.main() == 1
    assert "Gained less than 0.6: sft" in capsys.readouterr().out


def test_run_when_distill_has_no_teacher_says_so(
    curves: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "distill", "--sft", str(tmp_path)])

    with pytest.raises(SystemExit):
        curves.main()

    assert "distill needs a teacher" in capsys.readouterr().err


def test_answer_line_reward_when_called_looks_at_the_form_alone() -> None:
    spec = importlib.util.spec_from_file_location("algorithm_rewards", EXAMPLE / "rewards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.answer_line_reward_fn("", "so\n#### 12", [], []) == 1.0
    assert module.answer_line_reward_fn("", "#### 12 or so", [], []) == 0.0
