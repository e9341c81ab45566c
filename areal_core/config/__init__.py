"""The configuration machinery: typed fields, YAML with line numbers, overrides, plugin sections, JSON Schema.

The names here are resolved on first use: a plugin's configuration module imports ``areal_core.config.fields`` and must
not pay for the rest.
"""

from __future__ import annotations

from typing import Any

_LAZY = {
    "build": "compose",
    "dump_yaml": "document",
    "from_plain": "compose",
    "plugin_keywords": "plain",
    "read_document": "document",
    "to_plain": "plain",
}

__all__ = ["build", "dump_yaml", "from_plain", "plugin_keywords", "read_document", "to_plain"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
