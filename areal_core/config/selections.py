"""Which plugins a configuration selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from areal_core.config import classes
from areal_core.config.problems import KeyPath, key_text
from areal_core.plugins import PluginManager, get_plugin_manager
from areal_core.plugins.inspection import Entry
from areal_core.plugins.loading import is_import_path


def selected_plugins(config: Any, manager: PluginManager | None = None) -> Iterator[tuple[str, Entry]]:
    """``(key of the selector, entry)`` for every plugin a configuration names; import paths are left out.

    Raises:
        PluginError: naming the key, if one cannot be used.
    """
    yield from _walk(config, (), manager or get_plugin_manager())


def _walk(config: Any, path: KeyPath, manager: PluginManager) -> Iterator[tuple[str, Entry]]:
    cls: type = type(config)
    slot = classes.slot_of(cls)
    if slot is not None:
        name = classes.selected_plugin(slot, getattr(config, slot.selector))
        if not is_import_path(name):
            key = key_text((*path, slot.selector))
            yield key, manager.entry(slot.registry, name, key)
    for name in classes.public_fields(cls):
        value = getattr(config, name)
        items: Iterable[tuple[str | int, Any]] = enumerate(value) if isinstance(value, list) else ()
        if isinstance(value, dict) and classes.item_section_class(classes.fields_of(cls)[name].type) is not None:
            items = value.items()
        if attrs.has(type(value)):
            yield from _walk(value, (*path, name), manager)
        for part, item in items:
            if attrs.has(type(item)):
                yield from _walk(item, (*path, name, part), manager)
