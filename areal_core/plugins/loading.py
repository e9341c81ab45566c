"""Importing what a name stands for, with errors that say what is missing."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from areal_core.errors import PluginError, did_you_mean


def is_import_path(name: str) -> bool:
    """Whether a user wrote ``package.module:attribute`` instead of a registered name."""
    return ":" in name


def import_path(path: str, *, subject: str, hint: str = "") -> Any:
    """Import ``package.module:attribute``; the current directory counts as an import location.

    Args:
        subject: what the path is for; begins the error message.
        hint: what to do when the import fails; ends the error message.

    Raises:
        PluginError: if the path is malformed, or names a module or an attribute that does not exist, or if the module
            raises while it is imported.
    """
    module_name, _, attribute = path.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise PluginError(f"{subject}: {path!r} is not an import path. Write package.module:attribute.")
    module = import_module(module_name, subject=subject, hint=hint)
    target: Any = module
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            public = [name for name in dir(target) if not name.startswith("_")]
            raise PluginError(
                f"{subject}: {module_name} ({getattr(module, '__file__', None) or 'no file'}) has no attribute "
                f"{attribute!r}.{did_you_mean(part, public)}{hint}"
            ) from None
    return target


def import_module(name: str, *, subject: str, hint: str = "") -> Any:
    """Import a module that a user or a plugin named; every failure becomes a PluginError."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # A console script, unlike `python -m`, does not search the current directory. It goes last, so that a folder
        # of the user's hides no installed package; it stays, because worker processes import the same names.
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise PluginError(
                f"{subject}: there is no module {error.name!r}. It must be installed, or lie in the current directory "
                f"or on PYTHONPATH.{hint}"
            ) from error
        raise PluginError(f"{subject}: importing {name} failed: {describe(error)}.{hint}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{subject}: importing {name} failed: {describe(error)}.{hint}") from error


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
