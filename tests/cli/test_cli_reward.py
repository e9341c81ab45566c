from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from areal_core.cli.main import run as areal

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions in ``cli_rewards`` are imported by name, in other processes too."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def test_try_when_the_reward_works_then_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    code = areal(
        ["reward", "try", "cli_rewards:answer_reward_fn", "--completion", "2+2=4", "--prompt", "2+2=", "--answer", "4"]
    )

    assert code == 0
    assert capsys.readouterr().out.startswith("1  (")


def test_try_when_data_and_json_then_columns_arrive_with_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reward", "try", "cli_rewards:length_reward_fn", "--completion", "abc", "--data", "weight:=5"]

    assert areal([*arguments, "--data", "other=text", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["value"], result["runs_in"], result["error"]) == (True, 15.0, "process", None)
    assert result["seconds"] > 0


def test_try_when_the_completion_is_a_dash_then_standard_input_is_scored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("four"))

    assert areal(["reward", "try", "cli_rewards:length_reward_fn", "--completion", "-"]) == 0

    assert capsys.readouterr().out.startswith("4 ")


def test_try_when_async_then_it_runs_in_the_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["reward", "try", "cli_rewards:async_reward_fn", "--completion", "x"]) == 0

    assert "0.5" in (out := capsys.readouterr().out) and "event loop" in out


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("raises", "raised", "KeyError"),
        ("hangs", "timeout", "more than 0.5 s"),
        ("none", "none", "None"),
        ("nan", "nan", "nan"),
    ],
)
def test_try_when_the_reward_fails_then_exit_1_and_its_kind(
    capsys: pytest.CaptureFixture[str], name: str, kind: str, words: str
) -> None:
    arguments = ["reward", "try", f"cli_rewards:{name}_reward_fn", "--completion", "x", "--timeout", "0.5"]

    assert areal([*arguments, "--json"]) == 1

    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False and result["value"] is None
    assert result["error"]["kind"] == kind
    assert words.lower() in result["error"]["message"].lower()


def test_try_when_the_reward_fails_without_json_then_stderr_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["reward", "try", "cli_rewards:none_reward_fn", "--completion", "x"]) == 1

    output = capsys.readouterr()
    assert output.out == "" and "(kind: none)" in output.err and "Traceback" not in output.err


def run_file(path: Path, rewards: str) -> Path:
    path.write_text(f"trainer: rl\nactor: {{path: m}}\ntrain_dataset: {{name: arithmetic}}\n{rewards}\n")
    return path


NAMED = """\
rewards:
  length: {name: "cli_rewards:length_reward_fn", weight: 0.5}
  half: {name: "cli_rewards:async_reward_fn", weight: -2}
"""


def test_try_when_given_a_run_then_each_reward_and_their_sum(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = run_file(tmp_path / "run.yaml", NAMED)

    assert areal(["reward", "try", str(path), "rewards.half.weight=3", "--completion", "abcd"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("length: 4 * 0.5  (") and lines[1].startswith("half: 0.5 * 3  (")
    assert lines[2] == "total: 3.5"


def test_try_when_given_a_run_and_json_then_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = run_file(tmp_path / "run.yaml", NAMED)

    assert areal(["reward", "try", str(path), "--completion", "abcd", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["value"]) == (True, 0.5 * 4 - 2 * 0.5)
    assert {label: (part["value"], part["weight"]) for label, part in result["rewards"].items()} == {
        "length": (4.0, 0.5),
        "half": (0.5, -2.0),
    }


def test_try_when_a_run_has_a_single_reward_then_its_weighted_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = run_file(tmp_path / "run.yaml", 'reward: {name: "cli_rewards:async_reward_fn", weight: 4}')

    assert areal(["reward", "try", str(path), "--completion", "x"]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == "total: 2"


def test_try_when_the_run_distils_then_the_rewards_that_it_reports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer: distill\nactor: {path: m}\nteacher: {path: t}\ntrain_dataset: {name: arithmetic}\n"
        'reward: {name: "cli_rewards:async_reward_fn"}\n'
    )

    assert areal(["reward", "try", str(path), "--completion", "x"]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == "total: 0.5"


def test_try_when_one_reward_of_a_run_fails_then_the_others_still_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = run_file(tmp_path / "run.yaml", NAMED)

    code = areal(["reward", "try", str(path), "rewards.half.name=cli_rewards:none_reward_fn", "--completion", "x"])

    output = capsys.readouterr()
    assert code == 1 and "length: 1" in output.out and "total" not in output.out
    assert "half: reward 'half' returned None (kind: none)" in output.err


def test_try_when_the_sum_is_too_large_then_exit_1_as_training_would_reject_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = run_file(tmp_path / "run.yaml", NAMED)

    code = areal(["reward", "try", str(path), "rewards.half.weight=1.0e+39", "--completion", "x"])

    output = capsys.readouterr()
    assert code == 1 and "half: 0.5 * 1e+39" in output.out and "total" not in output.out
    assert "total: the weighted reward 5e+38 is too large for a 32-bit float" in output.err


@pytest.mark.parametrize(
    ("rewards", "arguments", "words"),
    [
        (NAMED, ["--option", "a=1"], "--option and --timeout"),
        (NAMED, ["rewards.half.name=absent"], "rewards.half.name: unknown reward 'absent'"),
        ("", [], "reward: is required"),
        ("", ["workflow.name=cli_rewards:rows"], "neither `reward` nor `rewards` is given"),
    ],
)
def test_try_when_the_run_is_bad_then_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rewards: str, arguments: list[str], words: str
) -> None:
    path = run_file(tmp_path / "run.yaml", rewards)

    assert areal(["reward", "try", str(path), *arguments, "--completion", "x"]) == 2

    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_reward"], "unknown reward 'no_such_reward'"),
        (["cli_rewards:absent"], "has no attribute 'absent'"),
        (["cli_rewards:length_reward_fn", "--data", "x"], "'x' is not a column"),
        (["cli_rewards:length_reward_fn", "--data", "x:={"], "the value of 'x' is not JSON"),
        (["cli_rewards:length_reward_fn", "--option", "a=1"], "has no options of its own"),
        (["cli_rewards:length_reward_fn", "--option", "a"], "Write name=value"),
        (["cli_rewards:length_reward_fn", "a=1"], "use --option K=V"),
    ],
)
def test_try_when_the_input_is_bad_then_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert areal(["reward", "try", *arguments, "--completion", "x"]) == 2

    assert words in capsys.readouterr().err
