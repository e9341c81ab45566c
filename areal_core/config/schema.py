"""JSON Schema (draft 2020-12) of configuration classes, for editors and other programs."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from areal_core.config import classes
from areal_core.config.fields import LABEL
from areal_core.config.plain import plain_value
from areal_core.plugins import PluginManager, get_plugin_manager

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}
#: A reference stands wherever its value would.
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}", "description": "A reference, ${key} or ${oc.env:VARIABLE}."}


def json_schema(trainers: Mapping[str, type], manager: PluginManager | None = None) -> dict[str, Any]:
    """The schema of a run's configuration.

    Args:
        trainers: configuration classes by the value of ``trainer``.
        manager: the plugins whose sections are described.

    Returns:
        The schema as plain data; the same for the same classes and plugins.
    """
    writer = _Writer(manager or get_plugin_manager())
    roots = {name: writer.reference(cls) for name, cls in trainers.items()}
    for cls in trainers.values():
        required = writer.definitions[writer.names[cls]].setdefault("required", [])
        if "trainer" not in required:
            required.insert(0, "trainer")
    schema: dict[str, Any] = {"$schema": DIALECT, "title": "AReaL run configuration"}
    if len(roots) == 1:
        schema.update(next(iter(roots.values())))
    else:
        # Conditions rather than alternatives: an editor then knows which keys fit as soon as `trainer` is written.
        schema["type"] = "object"
        schema["required"] = ["trainer"]
        schema["properties"] = {"trainer": {"enum": list(roots), "description": "Which trainer runs."}}
        schema["allOf"] = [
            {"if": {"properties": {"trainer": {"const": name}}, "required": ["trainer"]}, "then": reference}
            for name, reference in roots.items()
        ]
    schema["$defs"] = {"reference": _REFERENCE, **dict(sorted(writer.definitions.items()))}
    return schema


class _Writer:
    """Collects one definition per class."""

    def __init__(self, manager: PluginManager) -> None:
        self.manager = manager
        self.definitions: dict[str, dict[str, Any]] = {}
        self.names: dict[type, str] = {}

    def reference(self, cls: type) -> dict[str, Any]:
        if cls not in self.names:
            taken = cls.__name__ in self.definitions
            self.names[cls] = f"{cls.__module__}.{cls.__name__}" if taken else cls.__name__
            self.definitions[self.names[cls]] = {}  # before its fields: a class may hold itself
            self.definitions[self.names[cls]].update(self.section(cls))
        return {"$ref": f"#/$defs/{self.names[cls]}"}

    def section(self, cls: type) -> dict[str, Any]:
        fields = classes.public_fields(cls)
        schema: dict[str, Any] = {"type": "object"}
        if cls.__doc__ and not cls.__doc__.startswith("Method generated"):
            schema["description"] = inspect.cleandoc(cls.__doc__)
        schema["properties"] = {name: self.field(field) for name, field in fields.items()}
        slot = classes.slot_of(cls)
        if slot is not None:
            for entry, options in classes.configurable_plugins(slot, self.manager):
                section = {
                    "anyOf": [self.reference(options), {"type": "null"}],
                    "description": f"Options of {entry.name}: {entry.description}",
                }
                schema["properties"].setdefault(entry.name, section)
        required = [name for name, field in fields.items() if not classes.has_default(field)]
        if required:
            schema["required"] = required
        schema["additionalProperties"] = False
        return schema

    def field(self, field: attrs.Attribute[Any]) -> dict[str, Any]:
        bounds = {_BOUNDS[name]: field.metadata[name] for name in _BOUNDS if name in field.metadata}
        alternatives = [self.type(member) for member in classes.members(field.type)]
        for alternative in alternatives:
            if alternative.get("type") in ("integer", "number"):
                alternative.update(bounds)
        if not any(alternative in ({}, {"type": "string"}) for alternative in alternatives):
            alternatives.append({"$ref": "#/$defs/reference"})
        for alternative in alternatives:
            if field.metadata.get("labels") and alternative.get("type") == "object":
                alternative["propertyNames"] = {"pattern": f"^{LABEL}$"}
        schema = dict(alternatives[0]) if len(alternatives) == 1 else {"anyOf": alternatives}
        if field.metadata.get("help"):
            schema["description"] = field.metadata["help"]
        if classes.has_default(field):
            default = plain_value(classes.default_of(field))
            if not (isinstance(default, float) and not math.isfinite(default)):  # JSON has no such number
                schema["default"] = default
        return schema

    def type(self, type_: Any) -> dict[str, Any]:
        """The schema of one type that is not a union."""
        if type_ in _PLAIN:
            return dict(_PLAIN[type_])
        origin, arguments = typing.get_origin(type_) or type_, typing.get_args(type_)
        if origin is Literal:
            return {"enum": list(arguments)}
        if isinstance(origin, type):
            if attrs.has(origin):
                return self.reference(origin)
            if issubclass(origin, Enum):
                return {"enum": [member.value for member in origin]}
            if issubclass(origin, (list, tuple, set, frozenset)):
                return self.list(origin, arguments)
            if issubclass(origin, Mapping):
                return {"type": "object", "additionalProperties": self.nested(arguments[1]) if arguments else True}
        return {}

    def list(self, origin: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            schema["prefixItems"] = [self.nested(item) for item in arguments]
            schema["minItems"] = schema["maxItems"] = len(arguments)
        elif arguments:
            schema["items"] = self.nested(arguments[0])
        return schema

    def nested(self, type_: Any) -> dict[str, Any]:
        alternatives = [self.type(member) for member in classes.members(type_)]
        if not any(alternative in ({}, {"type": "string"}) for alternative in alternatives):
            alternatives.append({"$ref": "#/$defs/reference"})
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
