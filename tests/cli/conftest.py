"""The command line, run in this process or in a new one, with plugins made up on the spot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from areal_core.cli.main import run
from areal_core.plugins import get_plugin_manager


@attrs.frozen
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def areal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        get_plugin_manager.cache_clear()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield call
    get_plugin_manager.cache_clear()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder for made-up distributions; ``areal_process`` puts it on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def install(site: Path) -> Callable[..., None]:
    """Write a distribution of one plugin module."""

    def write(name: str, module: str, source: str) -> None:
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[areal]\n{module} = {module}\n")
        header = 'from areal_core import Registration, hookimpl\nAREAL_API_VERSION = "1.0"\n'
        (site / f"{module}.py").write_text(header + source)

    return write


@pytest.fixture
def areal_process(site: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Run a command line in a new process."""

    def call(*arguments: object, python: tuple[str, ...] = (), **environment: str) -> Outcome:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AREAL_")}
        result = subprocess.run(
            [sys.executable, *python, "-m", "areal_core.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            env={**kept, "PYTHONPATH": str(site), "COLUMNS": "200", **environment},
            check=False,
        )
        return Outcome(result.returncode, result.stdout, result.stderr)

    return call
