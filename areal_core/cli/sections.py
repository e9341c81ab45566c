"""Sections of a configuration from command-line options alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from areal_core.plugins import PluginManager

T = TypeVar("T")


def plugin_section(cls: type[T], values: dict[str, Any], name: str, options: list[str], manager: PluginManager) -> T:
    """A section that selects the plugin ``name``, with ``k=v`` options of the plugin's own (values are YAML).

    Raises:
        BadInputError: if an option is unknown or wrong; names it.
    """
    from areal_core.config import from_plain
    from areal_core.config.document import parse_value
    from areal_core.errors import BadInputError

    given: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise BadInputError(f"--option: {option!r} is not an option. Write name=value.")
        given[key] = parse_value(text)
    tree = dict(values)
    if given:
        if ":" in name:
            raise BadInputError(f"--option: {name!r} is an import path, and has no options of its own.")
        tree[name.partition("@")[0]] = given
    return from_plain(cls, tree, manager)
