"""Finding plugins: entry points of the group ``areal``, and the variables that select among them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: As in ``areal_core.hookspecs``, which would bring pluggy and attrs along: the command line's help needs this module.
ENTRY_POINT_GROUP = "areal"

#: Comma-separated distributions or entry-point names; nothing else loads. ``core`` always does.
ALLOW_VARIABLE = "AREAL_PLUGINS"
#: Comma-separated distributions or entry-point names that do not load.
DENY_VARIABLE = "AREAL_DISABLE_PLUGINS"

CORE_DISTRIBUTION = "areal-core"
CORE_MODULE = "areal_core.builtin"


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class EntryPoint(NamedTuple):
    """One entry point: its name, the module it points to, and the distribution that brings it."""

    name: str
    module: str
    distribution: str
    version: str

    @property
    def is_core(self) -> bool:
        return self.module == CORE_MODULE

    def is_named_in(self, names: Iterable[str]) -> bool:
        return any(name == self.name or canonical(name) == canonical(self.distribution) for name in names)


def discover() -> list[EntryPoint]:
    """Every entry point of the group, the kernel's first and then by distribution and name.

    A distribution whose metadata cannot be read is left out; so is one that another of the same name hides.
    """
    # Costs more than the rest of the command line's start, so only commands that need plugins pay for it.
    from importlib import metadata

    from areal_core import __version__

    found = {CORE_DISTRIBUTION: [EntryPoint("core", CORE_MODULE, CORE_DISTRIBUTION, __version__)]}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
            entries = list(parse_entry_points(text or ""))
            if not entries:
                continue
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:
            continue
        if name and canonical(name) not in found:
            found[canonical(name)] = [EntryPoint(*entry, name, version or "?") for entry in entries]
    entries_found = [entry for group in found.values() for entry in group]
    return sorted(entries_found, key=lambda e: (not e.is_core, canonical(e.distribution), e.name))


def parse_entry_points(text: str) -> Iterator[tuple[str, str]]:
    """The ``(name, module)`` pairs of our group in an ``entry_points.txt``; lines that make no sense are skipped."""
    section = ""
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == ENTRY_POINT_GROUP and "=" in line:
            name, target = (part.strip() for part in line.split("=", 1))
            yield name, target.split("[", 1)[0].strip().partition(":")[0]


def selected(variable: str) -> tuple[str, ...] | None:
    """The names in an environment variable; None when it is not set."""
    text = os.environ.get(variable)
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def why_disabled(entry: EntryPoint) -> str | None:
    """The reason the environment gives for not loading a plugin, or None."""
    if entry.is_core:
        return None
    if entry.is_named_in(selected(DENY_VARIABLE) or ()):
        return f"disabled by {DENY_VARIABLE}"
    allowed = selected(ALLOW_VARIABLE)
    if allowed is not None and not entry.is_named_in(allowed):
        return f"not in {ALLOW_VARIABLE}"
    return None


def unmatched(entries: Iterable[EntryPoint]) -> list[tuple[str, str]]:
    """``(variable, name)`` of every name in the environment's lists that no plugin has: most likely a typo."""
    entries = list(entries)
    return [
        (variable, name)
        for variable in (ALLOW_VARIABLE, DENY_VARIABLE)
        for name in selected(variable) or ()
        if not any(entry.is_named_in([name]) for entry in entries)
    ]


def plugins_that_mention(hook_name: str) -> list[EntryPoint]:
    """The plugins whose source names a hook: a cheap question that imports and runs nothing.

    Reads the entry points of installed folders, and the plugin modules, as text. A module whose source cannot be found
    this way, or that imports with ``*``, counts as one. Distributions in other places than folders are not seen.
    """
    needle = hook_name.encode()
    found: dict[tuple[str, str], EntryPoint] = {}
    for folder in _metadata_folders():
        try:
            text = (folder / "entry_points.txt").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        distribution, _, version = folder.stem.partition("-")
        for name, module in parse_entry_points(text):
            entry = EntryPoint(name, module, canonical(distribution), version or "?")
            if entry.is_core or why_disabled(entry) is not None:
                continue
            source = _source_of(module)
            if source is None or needle in source or b"import *" in source:
                found.setdefault((entry.distribution, name), entry)
    return sorted(found.values(), key=lambda e: (e.distribution, e.name))


def _metadata_folders() -> Iterator[Path]:
    for root in dict.fromkeys(sys.path):
        try:
            names = sorted(os.listdir(root or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                yield Path(root or ".", name)


def _source_of(module: str) -> bytes | None:
    relative = Path(*module.split("."))
    for root in dict.fromkeys(sys.path):
        for candidate in (Path(root, relative.with_suffix(".py")), Path(root, relative, "__init__.py")):
            try:
                return candidate.read_bytes()
            except OSError:
                continue
    return None
