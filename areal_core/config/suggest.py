"""The valid key that a user most likely meant, in the same section or around it."""

from __future__ import annotations

from collections.abc import Iterator

from areal_core.config import classes
from areal_core.config.problems import KeyPath, key_text
from areal_core.errors import PluginError, nearest
from areal_core.plugins import PluginManager

_DEPTH = 4


def suggestion(root: type, path: KeyPath, manager: PluginManager) -> str:
    """``"Did you mean 'actor.optimizer.lr'?"`` for an unknown key, or the keys that its section has.

    Looked for in this order: the same name further inside the section, the same name beside or around it, a similar
    name in the section, a similar name one level around.
    """
    *parents, name = path
    name = str(name)
    here = tuple(parents)
    cls = class_at(root, here, manager)
    if cls is None:
        return ""
    own = list(_names(cls, manager))
    below = list(_walk(cls, here, manager))
    candidates = [found for found in below if found[-1] == name]
    if not candidates:
        around = [found for found in _walk(root, (), manager) if found[-1] == name]
        # A common name such as `name` or `path` all over the tree tells nothing.
        near = [found for found in around if found[: len(here) - 1] == here[:-1]] if here else around
        candidates = next((found for found in (near, around) if 0 < len(found) <= 3), [])
    if candidates:
        return _question(min(candidates, key=len))
    match = nearest(name, own)
    if match is not None:
        return _question((*here, match))
    one_below = [found for found in below if len(found) == len(here) + 2]
    outer = here[:-1] if here else here
    outer_class = class_at(root, outer, manager)
    one_around = (
        [found for found in _walk(outer_class, outer, manager) if len(found) <= len(outer) + 2] if outer_class else []
    )
    for group in (one_below, one_around):
        match = nearest(name, [str(found[-1]) for found in group])
        if match is not None:
            return _question(next(found for found in group if found[-1] == match))
    return f"Valid keys here: {', '.join(own)}."


def _question(path: KeyPath) -> str:
    return f"Did you mean {key_text(path)!r}?"


def class_at(root: type, path: KeyPath, manager: PluginManager) -> type | None:
    """The configuration class of the section at a key; None when there is no section."""
    cls: type | None = root
    item: type | None = None  # of the list or mapping that was just entered
    for part in path:
        if item is not None:
            cls, item = item, None
            continue
        if cls is None or isinstance(part, int):
            return None
        field = classes.public_fields(cls).get(part)
        if field is not None:
            item = classes.item_section_class(field.type)
            cls = classes.section_class(field.type)
            continue
        slot = classes.slot_of(cls)
        if slot is None:
            return None
        try:
            cls = manager.options_class(slot.registry, part)
        except PluginError:
            return None
    return cls


def _names(cls: type, manager: PluginManager) -> Iterator[str]:
    yield from classes.public_fields(cls)
    slot = classes.slot_of(cls)
    if slot is not None:
        seen = {
            entry.name: None for entry in classes.plugin_entries(slot, manager) if entry.registration.config is not None
        }
        yield from seen


def _walk(cls: type, path: KeyPath, manager: PluginManager) -> Iterator[KeyPath]:
    for name, field in classes.public_fields(cls).items():
        yield (*path, name)
        inner = classes.section_class(field.type)
        if inner is not None and len(path) < _DEPTH:
            yield from _walk(inner, (*path, name), manager)
    slot = classes.slot_of(cls)
    if slot is not None:
        for entry in classes.plugin_entries(slot, manager):
            if entry.registration.config is not None:
                yield (*path, entry.name)
