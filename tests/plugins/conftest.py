"""Distributions made up on the spot: a dist-info folder and a module, on sys.path for one test."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_core.plugins import PluginManager


def write_distribution(
    site: Path, name: str, module: str, source: str, *, version: str = "1.0", entry_points: str | None = None
) -> None:
    """A distribution whose entry point ``{module}`` is the module of that name."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points or f"[areal]\n{module} = {module}\n")
    (site / f"{module}.py").write_text(textwrap.dedent(source))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path that is taken away again, with the modules imported from it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("AREAL_DISABLE_PLUGINS", raising=False)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def load(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginManager]:
    """A manager that sees the kernel and the given ``(distribution, module, source)`` alone."""

    def make(*distributions: tuple[str, str, str]) -> PluginManager:
        for name, module, source in distributions:
            write_distribution(site, name, module, source)
        importlib.invalidate_caches()
        monkeypatch.setenv("AREAL_PLUGINS", ",".join(name for name, _, _ in distributions))
        return PluginManager()

    return make
