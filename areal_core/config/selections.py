"""Which plugins a configuration selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from areal_core.config import classes
from areal_core.config.fields import PluginSlot
from areal_core.config.problems import KeyPath, Problem, key_text, raise_problems
from areal_core.errors import PluginError
from areal_core.plugins import PluginManager, get_plugin_manager
from areal_core.plugins.inspection import Entry
from areal_core.plugins.loading import is_import_path


def selected_plugins(config: Any, manager: PluginManager | None = None) -> Iterator[tuple[str, Entry]]:
    """``(key of the selector, entry)`` for every plugin a configuration names; import paths are left out.

    Raises:
        PluginError: naming the key, if one cannot be used.
    """
    manager = manager or get_plugin_manager()
    for path, slot, name in _selections(config, ()):
        if not is_import_path(name):
            key = key_text(path)
            yield key, manager.entry(slot.registry, name, key)


def check_import_paths(config: Any, manager: PluginManager | None = None) -> None:
    """Import whatever a configuration names by ``package.module:attribute``.

    Raises:
        ConfigError: with every one that cannot be imported, or is neither function nor class.
    """
    manager = manager or get_plugin_manager()
    problems = []
    for path, slot, name in _selections(config, ()):
        if not is_import_path(name):
            continue
        try:
            manager.load(slot.registry, name)
        except PluginError as error:
            problems.append(Problem(path, str(error)))
    raise_problems(problems, {})


def _selections(config: Any, path: KeyPath) -> Iterator[tuple[KeyPath, PluginSlot, str]]:
    """``(key of the selector, slot, selected name)`` of every plugin slot at and below ``config``."""
    cls: type = type(config)
    slot = classes.slot_of(cls)
    if slot is not None:
        yield (*path, slot.selector), slot, classes.selected_plugin(slot, getattr(config, slot.selector))
    for name, field in classes.public_fields(cls).items():
        value = getattr(config, name)
        items: Iterable[tuple[str | int, Any]] = ()
        if attrs.has(type(value)):
            yield from _selections(value, (*path, name))
        elif classes.item_section_class(field.type) is not None:
            items = value.items() if isinstance(value, dict) else enumerate(value or ())
        for part, item in items:
            yield from _selections(item, (*path, name, part))
