"""The errors a user sees. The command line prints them without a traceback and maps them to exit codes.

Every message says three things: the key or file it is about, what was wrong, and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class ArealError(Exception):
    """A failed run. The command exits with code 1."""

    exit_code = 1


class BadInputError(ArealError):
    """Input that can never work: a file, an option, a dataset. The command exits with code 2."""

    exit_code = 2


class ConfigError(BadInputError):
    """A configuration that is not valid.

    Args:
        message: what was wrong and what would be right.
        key: the full dotted key, e.g. ``"actor.optimizer.lr"``.
        where: file and line of the key, e.g. ``"run.yaml:12"``, or the command-line override it came from.
    """

    def __init__(self, message: str, *, key: str | None = None, where: str | None = None) -> None:
        self.message, self.key, self.where = message, key, where
        prefix = f"{where}: " if where else ""
        super().__init__(f"{prefix}{key}: {message}" if key else f"{prefix}{message}")


@contextmanager
def section(key: str) -> Iterator[None]:
    """Within it, a ConfigError names its key as seen from the section ``key``, e.g. an engine's from ``"actor"``."""
    try:
        yield
    except ConfigError as error:
        if error.key is None or error.where is not None:
            raise
        raise ConfigError(error.message, key=f"{key}.{error.key}") from error


class PluginError(BadInputError):
    """A plugin name that cannot be used: unknown, ambiguous, or broken. The message says why and what to do."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a user most likely meant, or None when nothing is close."""
    import difflib

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` (with the leading blank), or an empty string."""
    match = nearest(name, known)
    return f" Did you mean {match!r}?" if match else ""
