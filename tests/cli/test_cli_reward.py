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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_reward"], "unknown reward 'no_such_reward'"),
        (["cli_rewards:absent"], "has no attribute 'absent'"),
        (["cli_rewards:length_reward_fn", "--data", "x"], "'x' is not a column"),
        (["cli_rewards:length_reward_fn", "--data", "x:={"], "the value of 'x' is not JSON"),
        (["cli_rewards:length_reward_fn", "--option", "a=1"], "has no options of its own"),
        (["cli_rewards:length_reward_fn", "--option", "a"], "Write name=value"),
    ],
)
def test_try_when_the_input_is_bad_then_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert areal(["reward", "try", *arguments, "--completion", "x"]) == 2

    assert words in capsys.readouterr().err
