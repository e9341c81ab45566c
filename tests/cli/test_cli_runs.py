from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from areal_core.cli.main import run as areal
from areal_core.runs.listing import summarize
from areal_core.runs.run_dir import RunDirectory

CONFIG: dict[str, Any] = {"trainer": "rl", "checkpoint": {"metric": "eval/reward", "mode": "max"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Runs a (finished), b (killed), deep/c (failed), and a folder that is no run."""
    for name, status in (("a", "finished"), ("b", "running"), ("deep/c", "failed")):
        with RunDirectory.open(CONFIG, tmp_path / name) as run:
            for step in (1, 2, 3):
                run.log_metrics(step, {"rollout/reward": step / 4, "eval/reward": [0.2, 0.9, 0.8][step - 1]})
            (run.path / "checkpoints" / "step-000003").mkdir()
            (run.path / "weights" / "final").mkdir()
            run.set_status(status, "ValueError: no" if status == "failed" else None)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_list_when_there_are_runs_then_each_has_a_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["runs", "list", "--root", str(root)]) == 0

    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "STATUS", "TRAINER", "STEP", "LAST", "BEST", "UPDATED"]
    found = {line.split()[0]: line for line in lines}
    assert set(found) == {"a", "b", "deep/c"}
    assert "finished" in found["a"] and "reward 0.75  eval 0.8" in found["a"] and "0.9 at 2" in found["a"]
    assert "killed" in found["b"] and "failed" in found["deep/c"]


def test_list_when_json_then_a_program_can_read_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["runs", "list", "--root", str(root), "--json"]) == 0

    runs = {Path(item["path"]).name: item for item in json.loads(capsys.readouterr().out)}
    assert runs["a"]["best"] == {"metric": "eval/reward", "step": 2, "value": 0.9}
    assert (runs["a"]["status"], runs["a"]["step"], runs["a"]["checkpoints"]) == ("finished", 3, [3])
    assert runs["c"]["error"] == "ValueError: no"


def test_list_when_a_run_is_damaged_then_the_others_are_still_listed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "b" / "metrics.jsonl").write_text("x\ny\n")

    assert areal(["runs", "list", "--root", str(root)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("b ") and "damaged" in line for line in lines) and len(lines) == 4


def test_list_when_this_process_runs_it_then_it_is_running(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.open(CONFIG, root / "live"):
        areal(["runs", "list", "--root", str(root)])

    assert any(line.split()[:2] == ["live", "running"] for line in capsys.readouterr().out.splitlines())


def test_list_when_the_root_is_missing_then_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["runs", "list", "--root", str(tmp_path / "absent")]) == 2

    assert "absent is not a folder" in capsys.readouterr().err


def test_show_when_named_by_root_or_path_then_it_says_where_things_are(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert areal(["runs", "show", "a", "--root", str(root)]) == 0
    by_name = capsys.readouterr().out
    assert areal(["runs", "show", str(root / "a")]) == 0

    assert by_name == capsys.readouterr().out
    assert "eval/reward 0.9 at step 2" in by_name
    assert str(root / "a" / "weights" / "final") in by_name
    assert "checkpoints: step 3" in by_name
    assert [line.split() for line in by_name.splitlines() if line.startswith("rollout/reward")] == [
        ["rollout/reward", "0.75"]
    ]


def test_show_when_json_then_it_holds_the_last_metrics(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["runs", "show", "a", "--root", str(root), "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["last"]["rollout/reward"] == 0.75 and shown["report"] is None


@pytest.mark.parametrize(("name", "hint"), [("aa", "Did you mean 'a'"), ("notes", "no run 'notes'"), ("x", "deep/c")])
def test_show_when_there_is_no_such_run_then_exit_2_and_it_lists_those_there_are(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, hint: str
) -> None:
    assert areal(["runs", "show", name, "--root", str(root)]) == 2

    error = capsys.readouterr().err
    assert hint in error and "Runs in" in error


def test_report_when_asked_then_it_prints_the_path_and_opens_it(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)

    assert areal(["report", "a", "--root", str(root), "--open"]) == 0

    page = root / "a" / "report.html"
    assert capsys.readouterr().out.strip() == str(page) and page.stat().st_size > 1000
    assert opened == [page.as_uri()]


def test_report_when_the_metrics_are_damaged_then_exit_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "a" / "metrics.jsonl").write_text("x\ny\n")

    assert areal(["report", str(root / "a")]) == 2

    assert "metrics.jsonl:1" in capsys.readouterr().err and not (root / "a" / "report.html").exists()


@pytest.mark.parametrize(
    ("trainer", "checkpoint", "best"),
    [
        ("rl", {"metric": None, "mode": None}, ("eval/reward", 2, 0.9)),
        ("sft", {"metric": None, "mode": None}, ("eval/loss", 1, 0.1)),
        ("sft", {"metric": "eval/loss", "mode": "max"}, ("eval/loss", 3, 0.3)),
        ("dpo", {"metric": "eval/accuracy", "mode": None}, ("eval/accuracy", 2, 0.9 - 0.1)),
        ("rl", {"metric": "eval/absent", "mode": None}, None),
    ],
)
def test_summarize_when_the_metric_is_left_out_then_the_trainers_default_ranks(
    tmp_path: Path, trainer: str, checkpoint: dict[str, Any], best: Any
) -> None:
    with RunDirectory.open({"trainer": trainer, "checkpoint": checkpoint}, tmp_path / "r") as run:
        for step, reward in ((1, 0.2), (2, 0.9), (3, 0.8)):
            run.log_metrics(step, {"eval/reward": reward, "eval/accuracy": reward - 0.1, "eval/loss": step / 10})

    assert summarize(tmp_path / "r").best == best
