"""Configuration objects back to plain data that loads to the same object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs

from areal_core.config import classes

_REFERENCE = re.compile(r"(\\*)\$\{")


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars, with every key: structuring it gives an equal object.

    Paths become text; fields that the program sets are left out; a plugin's options stand under the plugin's name.
    """
    result: dict[str, Any] = {}
    cls: type = type(config)
    for name in classes.public_fields(cls):
        result[name] = plain_value(getattr(config, name))
    if classes.slot_of(cls) is not None:
        for name, options in config.plugin_options.items():
            result[name] = to_plain(options)
    return result


def plain_value(value: Any) -> Any:
    """One value of a configuration as plain data."""
    if attrs.has(type(value)):
        return to_plain(value)
    if isinstance(value, PurePath):
        return escape(str(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain_value(item) for item in sorted(value, key=repr)]
    return value


def plugin_keywords(section: Any) -> dict[str, Any]:
    """The options of a section's selected plugin as keyword arguments; empty when it has none.

    >>> reward(prompt, completions, prompt_ids, completion_ids, **plugin_keywords(config.reward))  # doctest: +SKIP
    """
    slot = classes.slot_of(type(section))
    if slot is None:
        return {}
    name = classes.selected_plugin(slot, getattr(section, slot.selector))
    options = section.plugin_options.get(name, section.plugin_options.get(name.partition("@")[0]))
    if options is None:
        return {}
    cls: type = type(options)
    return {name: getattr(options, name) for name in classes.fields_of(cls)}


def escape(text: str) -> str:
    """Text whose ``${`` is meant literally."""
    return _REFERENCE.sub(lambda match: f"{match[1] * 2}\\${{", text)


def unescape(text: str) -> str:
    """Undo :func:`escape`."""
    return _REFERENCE.sub(lambda match: "\\" * (len(match[1]) // 2) + "${", text)


def has_reference(text: str) -> bool:
    """Whether text holds a ``${...}`` that is not escaped."""
    return any(len(match[1]) % 2 == 0 for match in _REFERENCE.finditer(text))
