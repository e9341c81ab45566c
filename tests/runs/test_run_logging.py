from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.logging import component_kind, getLogger, setup_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger("areal")
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_setup_when_one_process_then_the_prefix_has_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO", rank=0, world_size=1)

    getLogger("FSDPEngine").info("loaded %d", 3)

    assert capsys.readouterr().err.endswith("[FSDPEngine] loaded 3\n")


def test_setup_when_another_rank_then_warnings_on_the_terminal_and_all_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "logs" / "rank-1.log"
    setup_logging("INFO", file, rank=1, world_size=2)

    getLogger("FSDPEngine").info("quiet")
    getLogger("FSDPEngine").warning("loud")

    assert "[FSDPEngine Rank 1] WARNING loud" in (error := capsys.readouterr().err) and "quiet" not in error
    lines = file.read_text().splitlines()
    assert lines[0].endswith("[FSDPEngine Rank 1] INFO quiet") and lines[1].endswith("WARNING loud")


def test_setup_when_torchrun_set_the_rank_then_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    setup_logging()

    getLogger("X").warning("w")

    assert "[X Rank 3] WARNING w" in capsys.readouterr().err


def test_setup_when_called_twice_then_each_record_appears_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("DEBUG")
    setup_logging("INFO")

    getLogger("X").info("once")
    getLogger("X").debug("never")

    error = capsys.readouterr().err
    assert error.count("once") == 1 and "never" not in error


def test_color_when_on_a_terminal_then_each_kind_has_one_and_levels_win(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal):
        setup_logging("INFO")

        getLogger("PPOActor").info("a")
        getLogger("FSDPEngine").info("b")
        getLogger("FSDPEngine").error("c")

    rl, compute, error = terminal.getvalue().splitlines()
    assert "\x1b[35m[PPOActor]\x1b[0m a" in rl
    assert "\x1b[36m[FSDPEngine]\x1b[0m b" in compute
    assert "\x1b[31m[FSDPEngine]\x1b[0m" in error and "\x1b[36m" not in error


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_color_when_the_user_does_not_want_it_then_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "dumb")
    with contextlib.redirect_stderr(terminal):
        setup_logging("INFO")

        getLogger("X").error("plain")

    assert "plain" in terminal.getvalue() and "\x1b" not in terminal.getvalue()


def test_color_when_not_a_terminal_then_none_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")
    getLogger("X").error("plain")
    setup_logging("INFO", color=True)
    getLogger("X").error("forced")

    plain, forced = capsys.readouterr().err.splitlines()
    assert "\x1b" not in plain and "\x1b" in forced


def test_record_when_file_only_then_the_terminal_does_not_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("INFO", tmp_path / "log")

    getLogger("X").info("hidden", extra={"file_only": True})

    assert capsys.readouterr().err == "" and "hidden" in (tmp_path / "log").read_text()


def test_record_when_an_exception_is_logged_then_its_traceback_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO")

    try:
        raise KeyError("gone")
    except KeyError:
        getLogger("X").exception("failed")

    error = capsys.readouterr().err
    assert "ERROR failed\nTraceback" in error and "KeyError: 'gone'" in error


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FSDPEngine", "compute"),
        ("RolloutController", "orchestration"),
        ("RLTrainer", "orchestration"),
        ("RewardPool", "infrastructure"),
        ("PluginManager", "infrastructure"),
        ("GRPO", "rl"),
        ("AsyncReward", "rl"),
        ("DataLoader", "data"),
        ("Trackers", "data"),
        ("Unheard", "orchestration"),
    ],
)
def test_component_kind_when_named_in_pascal_case_then_the_last_known_word_decides(name: str, kind: str) -> None:
    assert component_kind(name) == kind


def test_import_when_alone_then_it_loads_no_torch() -> None:
    code = (
        "import sys, areal_core.logging, areal_core.stats, areal_core.runs.run_dir, areal_core.runs.progress;"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules), sys.modules.keys()"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
