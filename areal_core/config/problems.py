"""What is wrong with a configuration, with the key and the place; all of it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from areal_core.errors import ConfigError

#: A key as its parts: names of sections and fields, and indices of lists.
KeyPath = tuple[str | int, ...]


@attrs.frozen
class Position:
    """Where a key stands in a file; lines and columns count from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


#: Where each key was set: a position in a file, or text such as ``"override 'seed=2'"``.
Positions = Mapping[KeyPath, Position | str]


@attrs.frozen
class Problem:
    """One thing that is wrong.

    Attributes:
        path: the key, relative to whatever is looked at.
        message: what was wrong and what would be right.
        kind: ``unknown`` problems get the nearest valid key appended when the whole configuration is known.
    """

    path: KeyPath
    message: str
    kind: Literal["value", "unknown"] = "value"

    def below(self, *parents: str | int) -> Problem:
        return attrs.evolve(self, path=(*parents, *self.path))


class ConfigErrors(ConfigError):
    """Several errors of one configuration; one line each.

    Attributes:
        errors: the single errors.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


def key_text(path: KeyPath) -> str:
    """``("trackers", 0, "name")`` as ``trackers[0].name``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def where(path: KeyPath, positions: Positions) -> str | None:
    """The place of a key, or of the innermost section around it that has one."""
    for length in range(len(path), -1, -1):
        if path[:length] in positions:
            return str(positions[path[:length]])
    return None


def raise_problems(problems: Sequence[Problem], positions: Positions) -> None:
    """Raise what is in ``problems`` as one error; return if there is nothing.

    Raises:
        ConfigError: a :class:`ConfigErrors` when there are several.
    """
    errors = [
        ConfigError(problem.message, key=key_text(problem.path) or None, where=where(problem.path, positions))
        for problem in problems
    ]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)
