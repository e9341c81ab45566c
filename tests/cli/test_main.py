"""The frame of the command line: help, errors, exit codes, plugins' commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from areal_core import ArealError, BadInputError, ConfigError, __version__
from areal_core.cli import console, main
from areal_core.cli.reference import render_markdown

HEAVY = {"torch", "transformers", "datasets", "omegaconf", "numpy", "yaml", "rich.markdown"}
HEAVY |= {"attrs", "pluggy", "importlib.metadata", "packaging"}

COMMAND_PLUGIN = """
@hookimpl
def areal_commands(app):
    @app.command("hello", help="Greets.")
    def hello(name: str = "you") -> None:
        print("hello", name)
"""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Adds a command ``fail`` that raises what it is given."""

    def use(error: BaseException) -> None:
        original = main.build_app

        def build() -> typer.Typer:
            app = original()

            @app.command("fail")
            def fail() -> None:
                raise error

            return app

        monkeypatch.setattr(main, "build_app", build)

    return use


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArealError("it broke"), 1, "Error: it broke\n"),
        (BadInputError("no such thing"), 2, "Error: no such thing\n"),
        (ConfigError("is odd", key="a.b", where="r.yaml:3"), 2, "Error: r.yaml:3: a.b: is odd\n"),
        (BadInputError("one\ntwo"), 2, "Error:\n  one\n  two\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
        (ValueError("odd"), 1, "Error:\n  ValueError: odd\n  Run with --debug for the traceback.\n"),
        (ValueError(), 1, "Error:\n  ValueError\n  Run with --debug for the traceback.\n"),
        (SystemExit(143), 143, ""),
        (SystemExit("words"), 1, "Error: words\n"),
        (typer.Exit(3), 3, ""),
        (typer.BadParameter("bad"), 2, "Error:\n  Invalid value: bad\n"),
    ],
)
def test_run_when_a_command_raises_prints_one_block_and_exits_with_its_code(
    areal: Any, failing: Any, error: BaseException, code: int, message: str
) -> None:
    failing(error)

    outcome = areal("fail")

    assert outcome.code == code
    assert outcome.stderr.startswith(message) if message else outcome.stderr == ""
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout.strip() == ""


@pytest.mark.parametrize("arguments", [("--debug", "fail"), ("fail", "--debug")])
def test_run_when_debug_is_set_anywhere_adds_the_traceback(areal: Any, failing: Any, arguments: Any) -> None:
    failing(ValueError("odd"))

    outcome = areal(*arguments)

    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.stderr
    assert outcome.stderr.endswith("Error: ValueError: odd\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "No such command 'trian'"),
        (("plugins", "lst"), "No such command 'lst'"),
        (("config", "show"), "Missing argument 'CONFIG'"),
        (("config", "schema", "--bogus"), "No such option"),
        (("--bogus",), "No such option"),
    ],
)
def test_run_when_usage_is_wrong_exits_with_2(areal: Any, arguments: tuple[str, ...], message: str) -> None:
    outcome = areal(*arguments)

    assert outcome.code == 2
    assert message in outcome.stderr and re.search(r"Try 'areal.* --help'", outcome.stderr)
    assert outcome.stdout == ""


def test_run_when_asked_for_version_prints_it(areal: Any) -> None:
    outcome = areal("--version")

    assert (outcome.code, outcome.stdout) == (0, f"areal-core {__version__} (plugin API 1.0)\n")


def test_run_when_the_shell_asks_completes_commands(areal_process: Any) -> None:
    outcome = areal_process(_AREAL_COMPLETE="complete_bash", COMP_WORDS="areal plu", COMP_CWORD="1")

    assert outcome.stdout.split() == ["plugins"]


def test_run_when_nothing_is_asked_prints_the_help(areal: Any) -> None:
    assert areal() == areal("--help")
    assert areal().code == 0


def _commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = [(path, command)] if path else []
    for name, child in getattr(command, "commands", {}).items():
        found += _commands(child, (*path, name))
    return found


def test_help_when_asked_of_every_command_exits_0_and_shows_an_example(areal: Any) -> None:
    commands = _commands(typer.main.get_group(main.build_app()))
    assert {("train",), ("plugins", "list"), ("config", "check")} <= {path for path, _ in commands}

    for path, command in commands:
        outcome = areal(*path, "--help")

        assert outcome.code == 0, path
        if not getattr(command, "commands", None):
            assert "areal " + " ".join(path) in outcome.stdout.split("Example")[-1], path


def test_help_when_shown_in_a_new_process_imports_nothing_heavy(areal_process: Any) -> None:
    outcome = areal_process("--help", python=("-X", "importtime"), AREAL_DISABLE_PLUGINS="areal-arithmetic")

    imported = {line.rpartition("|")[2].strip() for line in outcome.stderr.splitlines()}
    assert outcome.code == 0 and "Usage: areal" in outcome.stdout
    assert "typer" in imported, "the import times are on stderr"
    assert not HEAVY & imported


def test_plugins_list_when_run_in_a_new_process_imports_no_torch(areal_process: Any) -> None:
    outcome = areal_process("plugins", "list", "--json", python=("-X", "importtime"))

    imported = {line.rpartition("|")[2].strip() for line in outcome.stderr.splitlines()}
    assert outcome.code == 0 and outcome.json["plugins"][0]["name"] == "core"
    assert not {"torch", "transformers", "datasets", "omegaconf"} & imported


def test_plugin_command_when_installed_is_listed_and_runs(areal_process: Any, install: Any) -> None:
    install("fake-hello", "fake_hello", COMMAND_PLUGIN)

    listed, ran = areal_process("--help"), areal_process("hello", "--name", "Ada")

    assert re.search(r"hello +Greets\.", listed.stdout)
    assert (ran.code, ran.stdout) == (0, "hello Ada\n")


def test_plugin_command_when_source_hides_it_still_runs(areal_process: Any, install: Any, site: Any) -> None:
    install("fake-hello", "fake_hello", "import fake_rest\nglobals().update(vars(fake_rest))\n")
    (site / "fake_rest.py").write_text("from areal_core import hookimpl\n" + COMMAND_PLUGIN)

    assert areal_process("hello").stdout == "hello you\n"


def test_plugin_command_when_its_hook_fails_leaves_the_rest_working(areal_process: Any, install: Any) -> None:
    install("fake-bad", "fake_bad", COMMAND_PLUGIN.replace("hello", "bye") + "    raise RuntimeError('boom')\n")
    install("fake-hello", "fake_hello", COMMAND_PLUGIN)

    outcome = areal_process("--help")

    assert outcome.code == 0
    assert "hello" in outcome.stdout and "bye" not in outcome.stdout and "train" in outcome.stdout
    assert "Warning: the commands of plugin fake_bad@fake-bad are left out: RuntimeError: boom" in outcome.stderr


def test_plugin_command_when_name_is_taken_is_left_out(areal_process: Any, install: Any) -> None:
    install("fake-train", "fake_train", COMMAND_PLUGIN.replace("hello", "train"))

    outcome = areal_process("--help")

    assert "has a command 'train', which exists already" in outcome.stderr
    assert "Greets" not in outcome.stdout


def test_plugin_command_when_another_is_mistyped_is_not_said_to_exist_twice(areal_process: Any, install: Any) -> None:
    install("fake-hello", "fake_hello", COMMAND_PLUGIN)
    install("fake-bad", "fake_bad", COMMAND_PLUGIN.replace("hello", "bye") + "    raise RuntimeError('boom')\n")

    outcome = areal_process("helo")

    assert outcome.code == 2 and "Did you mean 'hello'?" in outcome.stderr
    assert "exists already" not in outcome.stderr
    assert outcome.stderr.count("boom") == 1


def test_plugin_command_when_plugin_is_disabled_is_not_there(areal_process: Any, install: Any) -> None:
    install("fake-hello", "fake_hello", COMMAND_PLUGIN)

    assert areal_process("hello", AREAL_DISABLE_PLUGINS="fake-hello").code == 2


def test_run_when_the_reader_goes_away_says_nothing(site: Any) -> None:
    command = [sys.executable, "-m", "areal_core.cli.main", "config", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()

    assert stderr == b""


def test_print_table_when_plain_aligns_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(("A", "LONGER"), [("x" * 300, "1"), ("y", "2")])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A".ljust(302) + "LONGER"
    assert lines[2] == "y".ljust(302) + "2"


def test_is_plain_when_no_color_is_set_holds_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not console.is_plain(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.is_plain(Terminal())  # type: ignore[arg-type]


def test_render_markdown_when_called_describes_every_command() -> None:
    page = render_markdown()

    for path, _ in _commands(typer.main.get_group(main.build_app())):
        assert f"`areal {' '.join(path)}`\n" in page
    assert page == render_markdown()


@pytest.mark.parametrize(
    ("error", "traced"),
    [(ConfigError("no", key="actor.lr"), False), (RuntimeError("no"), True)],
    ids=["bad input", "a bug"],
)
def test_run_when_started_by_torchrun_leaves_the_error_and_traces_bugs_alone(
    error: Exception, traced: bool, failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(error)
    file = tmp_path / "error.json"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)

    main.run(["fail"])

    message = json.loads(file.read_text())["message"]
    assert str(error) in message["message"]
    trace = message["extraInfo"]["py_callstack"]
    assert str(error) in trace
    assert (trace.count("  File ") > 1) == traced


def test_help_when_80_columns_wide_cuts_no_line_of_a_command(areal_process):
    groups = ("data", "reward", "runs", "config", "plugins")

    pages = [areal_process(*arguments, "--help", COLUMNS="80") for arguments in ((), *((group,) for group in groups))]

    for page in pages:
        commands = page.stdout.partition("Commands:")[2]
        assert commands.strip()
        assert "..." not in commands
