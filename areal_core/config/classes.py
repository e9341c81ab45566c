"""Reading configuration classes: their fields, the sections and plugins below them, their types in words."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from areal_core.config.fields import PluginSlot
from areal_core.errors import PluginError
from areal_core.plugins import PluginManager
from areal_core.plugins.inspection import Entry

_ENGINES = ("areal_train_engines", "areal_inference_engines")


@functools.cache
def fields_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields of a configuration class by name, with their types resolved.

    Raises:
        PluginError: if an annotation names something that does not exist at run time.
    """
    try:
        attrs.resolve_types(cls)  # type: ignore[type-var]
    except NameError as error:
        raise PluginError(
            f"{cls.__module__}.{cls.__qualname__}: a field's annotation cannot be resolved ({error}). "
            "Import the names of field types outside TYPE_CHECKING."
        ) from None
    return {field.name: field for field in attrs.fields(cls)}


def is_internal(field: attrs.Attribute[Any]) -> bool:
    """Whether the program sets a field, and not a user."""
    return bool(field.metadata.get("internal")) or not field.init


def public_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a user may set, in order."""
    return {name: field for name, field in fields_of(cls).items() if not is_internal(field)}


def has_default(field: attrs.Attribute[Any]) -> bool:
    return field.default is not attrs.NOTHING


def default_of(field: attrs.Attribute[Any]) -> Any:
    """The default value; None for a factory that needs the instance."""
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return None if default.takes_self else default.factory()
    return default


def slot_of(cls: type) -> PluginSlot | None:
    return getattr(cls, "PLUGIN_SLOT", None)


def is_union(type_: Any) -> bool:
    return typing.get_origin(type_) in (typing.Union, types.UnionType)


def members(type_: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the type itself otherwise."""
    return typing.get_args(type_) if is_union(type_) else (type_,)


def section_class(type_: Any) -> type | None:
    """The configuration class of a section (``X`` or ``X | None``), or None for a plain value."""
    for member in members(type_):
        if isinstance(member, type) and attrs.has(member):
            return member
    return None


def item_section_class(type_: Any) -> type | None:
    """The configuration class of a list's items or a mapping's values, or None."""
    for member in members(type_):
        if typing.get_origin(member) in (list, dict):
            return section_class(typing.get_args(member)[-1])
    return None


def is_mapping(type_: Any) -> bool:
    """Whether a field holds a mapping (or null)."""
    return any(dict in (member, typing.get_origin(member)) for member in members(type_))


def selected_plugin(slot: PluginSlot, selector: str) -> str:
    """The plugin's name in a selector: ``fsdp`` of ``fsdp:d4``; the whole text for anything but a backend."""
    return selector.partition(":")[0] if slot.registry in _ENGINES else selector


def plugin_entries(slot: PluginSlot, manager: PluginManager) -> list[Entry]:
    return manager.registrations(slot.registry)


def configurable_plugins(slot: PluginSlot, manager: PluginManager) -> Iterator[tuple[Entry, type]]:
    """The usable plugins of a slot that have options, with their classes; by name, each once."""
    seen: set[str] = set()
    for entry in sorted(plugin_entries(slot, manager), key=lambda entry: entry.name):
        if entry.problem is not None or entry.registration.config is None or entry.name in seen:
            continue
        seen.add(entry.name)
        try:
            options = manager.options_class(slot.registry, entry.full_name)
        except PluginError:
            continue
        if options is not None:
            yield entry, options


def type_text(type_: Any) -> str:
    """A type in words, for messages and the reference: ``an integer or null``."""
    if is_union(type_):
        parts = [type_text(member) for member in members(type_)]
        return " or ".join(dict.fromkeys(parts))
    origin = typing.get_origin(type_)
    if origin is Literal:
        choices = typing.get_args(type_)
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
    if isinstance(type_, type) and issubclass(type_, Enum):
        return "one of " + ", ".join(repr(member.value) for member in type_)
    if origin in (list, tuple, set, frozenset) or type_ in (list, tuple, set, frozenset):
        item = next((arg for arg in typing.get_args(type_) if arg is not Ellipsis), None)
        return f"a list of {_plural(item)}" if item is not None else "a list"
    if origin is dict or type_ is dict:
        return "a mapping of sections" if item_section_class(type_) is not None else "a mapping"
    if isinstance(type_, type) and attrs.has(type_):
        return "a section"
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    words[type(None)] = "null"
    words[Any] = "anything"  # type: ignore[index]
    return words.get(type_, getattr(type_, "__name__", str(type_)))


def _plural(type_: Any) -> str:
    words = {int: "integers", float: "numbers", str: "texts", bool: "true / false", Path: "paths"}
    return words.get(type_, "sections" if section_class(type_) else f"({type_text(type_)})")


def value_text(value: Any) -> str:
    """A value a user gave, and its type in words."""
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list"}
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({words.get(type(value), type(value).__name__)})"
