"""docs/benchmarks.md: one page, a section of its own for each benchmark, so that any of them can be run alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
TITLE = (
    "# Benchmarks\n\n"
    "<!-- Written by the scripts in benchmarks/. Do not edit between the markers; run `nox -s bench`. -->\n"
)
#: Sections in the order of the page; others follow in the order in which they were first written.
ORDER = ("quickstart_vs_trl", "cli_start", "orchestrator", "async_vs_sync", "generation", "tree_training", "vocabulary")
_SECTION = re.compile(r"<!-- bench:(?P<name>\w+) -->\n.*?<!-- /bench:(?P=name) -->\n?", re.DOTALL)


def write_section(name: str, markdown: str) -> Path:
    """Replace the section ``name`` of the page, or add it; the others stay as they are.

    Args:
        name: an identifier, normally the script's file name without its ending.
        markdown: the section with its ``## `` heading.

    Returns:
        The page's path.
    """
    if not name.isidentifier():
        raise ValueError(f"a section's name is an identifier, got {name!r}")
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    sections = {match["name"]: match[0].strip() for match in _SECTION.finditer(text)}
    sections[name] = f"<!-- bench:{name} -->\n{markdown.strip()}\n<!-- /bench:{name} -->"
    names = [known for known in ORDER if known in sections] + [other for other in sections if other not in ORDER]
    PAGE.write_text("\n".join([TITLE, *(sections[each] + "\n" for each in names)]), encoding="utf-8")
    return PAGE


def measured_on(*packages: str) -> str:
    """A sentence that says on what a section's figures were measured."""
    versions = "".join(f", {package} {importlib.metadata.version(package)}" for package in packages)
    return f"Measured on {os.cpu_count()} CPU cores, Python {platform.python_version()}{versions}."


def table(header: tuple[str, ...], *rows: tuple[str, ...]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
