"""Plain data to configuration objects: strict types, every problem with its full key.

cattrs chooses the hook for a type; the hooks here never convert silently. Text is not a number, ``2.5`` is not an
integer, ``true`` is not 1; an integer is accepted where a number is expected.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import cattrs

from areal_core.config import classes
from areal_core.config.fields import ItemError, PluginSlot
from areal_core.config.problems import Problem
from areal_core.errors import BadInputError, PluginError, did_you_mean
from areal_core.plugins import PluginManager, get_plugin_manager

T = TypeVar("T")


class StructureError(Exception):
    """What is wrong with one value; paths are relative to it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = list(problems)


def _fail(message: str) -> typing.NoReturn:
    raise StructureError([Problem((), message)])


def _expected(type_: Any, value: Any) -> typing.NoReturn:
    message = f"expected {classes.type_text(type_)}, got {classes.value_text(value)}"
    if str in classes.members(type_) and isinstance(value, (int, float)):
        message += ". Put it in quotes"
    _fail(message)


class Structurer:
    """Structures configuration classes; plugin sections are looked up in ``manager``."""

    def __init__(self, manager: PluginManager | None = None) -> None:
        self.manager = manager or get_plugin_manager()
        converter = cattrs.Converter()
        for type_ in (int, float, str, bool, Path):
            converter.register_structure_hook(type_, _scalar)
        converter.register_structure_hook_func(lambda t: t is type(None), _scalar)
        converter.register_structure_hook_func(_is_anything, lambda value, _: value)
        converter.register_structure_hook_func(_is_enum, _enum)
        converter.register_structure_hook_func(_is_literal, _literal)
        converter.register_structure_hook_func(_is_sequence, self._sequence)
        converter.register_structure_hook_func(_is_mapping, self._mapping)
        converter.register_structure_hook_func(classes.is_union, self._union)
        converter.register_structure_hook_func(lambda t: isinstance(t, type) and attrs.has(t), self._section)
        self._converter = converter

    def structure(self, value: Any, type_: Any) -> Any:
        """``value`` as ``type_``.

        Raises:
            StructureError: with every problem found below ``value``.
        """
        try:
            return self._converter.structure(value, type_)
        except cattrs.errors.StructureHandlerNotFoundError:
            # A class of the plugin author's own: accepted only as it is.
            if isinstance(type_, type) and isinstance(value, type_):
                return value
            _fail(f"the type {type_!r} cannot be given in a configuration")

    # ------------------------------------------------------------------------------------------------ containers

    def _items(self, pairs: Any, type_: Any) -> list[Any]:
        result, problems = [], []
        for key, value in pairs:
            try:
                result.append(self.structure(value, type_))
            except StructureError as error:
                problems += [problem.below(key) for problem in error.problems]
        if problems:
            raise StructureError(problems)
        return result

    def _sequence(self, value: Any, type_: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            _expected(type_, value)
        origin = typing.get_origin(type_) or type_
        arguments = typing.get_args(type_)
        constructor = origin if origin in (tuple, set, frozenset) else list
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                _fail(f"expected a list of {len(arguments)} items, got {len(value)}")
            pairs = zip(enumerate(value), arguments, strict=True)
            return tuple(self._items([pair], item)[0] for pair, item in pairs)
        return constructor(self._items(enumerate(value), arguments[0] if arguments else Any))

    def _mapping(self, value: Any, type_: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _expected(type_, value)
        key_type, item_type = typing.get_args(type_) or (str, Any)
        keys = []
        for key in value:
            # YAML keys arrive as text; a class that wants numbers gets them.
            number = isinstance(key, str) and key.lstrip("-").isdigit()
            keys.append(int(key) if key_type is int and number else key)
        self._items([(str(key), key) for key in keys], key_type)
        return dict(zip(keys, self._items(value.items(), item_type), strict=True))

    def _union(self, value: Any, type_: Any) -> Any:
        members = classes.members(type_)
        if value is None and type(None) in members:
            return None
        candidates = [member for member in members if member is not type(None)]
        # An exact scalar first, so that 1 stays an integer in `float | int`.
        candidates.sort(key=lambda member: member is not type(value))
        failures: list[StructureError] = []
        for member in candidates:
            try:
                return self.structure(value, member)
            except StructureError as error:
                failures.append(error)
        if len(failures) == 1 and not (failures[0].problems[0].path == () and type(None) in members):
            raise failures[0]
        deep = [error for error in failures if any(problem.path for problem in error.problems)]
        if deep:
            raise deep[0]
        literal = next((m for m in candidates if _is_literal(m)), None)
        if literal is not None and len(candidates) == 1:
            _literal(value, literal, or_null=type(None) in members)
        _expected(type_, value)

    # -------------------------------------------------------------------------------------------------- sections

    def _section(self, value: Any, cls: type) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            names = list(classes.public_fields(cls))
            example = f" with keys such as {', '.join(names[:3])}" if names else ""
            _fail(f"expected a section{example}, got {classes.value_text(value)}")
        problems: list[Problem] = []
        arguments: dict[str, Any] = {}
        for name, field in classes.public_fields(cls).items():
            if name in value:
                try:
                    arguments[field.alias or name] = self._field(value[name], field)
                except StructureError as error:
                    problems += [problem.below(name) for problem in error.problems]
            elif not classes.has_default(field):
                help = field.metadata.get("help", "")
                problems.append(Problem((name,), f"is required{f' ({help.rstrip(chr(46))})' if help else ''}"))
        slot = classes.slot_of(cls)
        if slot is None:
            problems += [problem for key in value for problem in self._extra_key(key, cls)]
        else:
            options, found = self._plugin_options(value, cls, slot, arguments)
            problems += found
            arguments["plugin_options"] = options
        if problems:
            raise StructureError(problems)
        try:
            return cls(**arguments)
        except (ValueError, TypeError, BadInputError) as error:
            _fail(str(error))

    def _field(self, value: Any, field: attrs.Attribute[Any]) -> Any:
        if type(value) is float and math.isinf(value) and value == classes.default_of(field):
            return value  # A plugin's author chose it.
        result = value if field.type is None else self.structure(value, field.type)
        if field.validator is not None:
            try:
                field.validator(None, field, result)
            except AttributeError:
                pass  # It looks at other fields: the constructor runs it again, with all of them.
            except ItemError as error:
                raise StructureError([Problem((error.item,), str(error))]) from None
            except (ValueError, TypeError) as error:
                message = str(error.args[0]) if error.args else str(error)
                # The user wrote -1, not -1.0.
                _fail(message.replace(repr(result), repr(value)) if type(value) is int else message)
        return result

    def _extra_key(self, key: str, cls: type) -> list[Problem]:
        """What is wrong with a key that is neither a public field nor a plugin's section; nothing for a field."""
        fields = classes.fields_of(cls)
        if key not in fields:
            return [Problem((key,), "unknown key.", "unknown")]
        if not classes.is_internal(fields[key]):
            return []
        if key == "plugin_options" and classes.slot_of(cls) is not None:
            return [Problem((key,), "cannot be set; write a plugin's options under the plugin's own name")]
        return [Problem((key,), "is set by the program; remove it")]

    def _plugin_options(
        self, value: dict[str, Any], cls: type, slot: PluginSlot, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Problem]]:
        """The options of the plugins that have a section, and of the selected one in any case."""
        options: dict[str, Any] = {}
        problems: list[Problem] = []
        known = {entry.name for entry in classes.plugin_entries(slot, self.manager)}
        selected = self._selected(value, cls, slot, arguments)
        short = selected.partition("@")[0] if selected else None
        section: Any = {}
        section_key = short or ""
        for key, item in value.items():
            if selected and key in (selected, short) and key not in classes.fields_of(cls):
                section, section_key = item, key
            elif key in classes.fields_of(cls) or key.partition("@")[0] not in known:
                problems += self._extra_key(key, cls)
            else:
                problems += self._options_of(slot, key, key, item, options)
        if selected:
            try:
                self.manager.options_class(slot.registry, selected)
            except PluginError as error:
                return options, [*problems, Problem((slot.selector,), str(error))]
            problems += self._options_of(slot, selected, section_key, section, options)
        return options, problems

    def _options_of(
        self, slot: PluginSlot, name: str, key: str, section: Any, options: dict[str, Any]
    ) -> list[Problem]:
        """Put a plugin's options into ``options``; returns what is wrong with its section."""
        try:
            options_class = self.manager.options_class(slot.registry, name)
            if options_class is None:
                return [Problem((key,), "this plugin has no options; remove the section")] if section else []
            options[name] = self.structure({} if section is None else section, options_class)
        except StructureError as error:
            return [problem.below(key) for problem in error.problems]
        except PluginError as error:
            return [Problem((key,), str(error))]
        return []

    def _selected(self, value: dict[str, Any], cls: type, slot: PluginSlot, arguments: dict[str, Any]) -> str | None:
        """The selected plugin's name; None when the selector itself is wrong."""
        default = classes.default_of(classes.fields_of(cls)[slot.selector]) if slot.selector not in value else None
        selector = arguments.get(slot.selector, default)
        return classes.selected_plugin(slot, selector) if isinstance(selector, str) else None


def _is_anything(type_: Any) -> bool:
    return type_ is Any or type_ is object


def _is_literal(type_: Any) -> bool:
    return typing.get_origin(type_) is Literal


def _is_enum(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Enum)


def _is_sequence(type_: Any) -> bool:
    origin = typing.get_origin(type_) or type_
    if origin in (list, tuple, set, frozenset):
        return True
    return isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, (str, bytes))


def _is_mapping(type_: Any) -> bool:
    origin = typing.get_origin(type_) or type_
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _scalar(value: Any, type_: Any) -> Any:
    if type_ is float and type(value) is int:
        return float(value)
    if type_ is Path and isinstance(value, (str, Path)):
        return Path(value)
    if type(value) is not type_:
        _expected(type_, value)
    if type_ is float and not math.isfinite(value):
        # It would surface as a NaN loss, or as a run that never ends, much later.
        _fail(f"expected a finite number, got {value}")
    return value


def _enum(value: Any, type_: Any) -> Any:
    for member in type_:
        if value is member or (type(value) is type(member.value) and value == member.value):
            return member
    return _expected(type_, value)


def _literal(value: Any, type_: Any, *, or_null: bool = False) -> Any:
    choices = typing.get_args(type_)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    texts = [choice for choice in choices if isinstance(choice, str)]
    suggestion = did_you_mean(value, texts) if isinstance(value, str) else ""
    null = " or null" if or_null else ""
    return _fail(f"must be {classes.type_text(type_)}{null}, got {classes.value_text(value)}.{suggestion}".rstrip("."))
