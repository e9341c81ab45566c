"""Plugins: discovery by entry point, isolation of broken ones, and names to implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_core.plugins.manager import PluginManager, get_plugin_manager

__all__ = ["PluginManager", "get_plugin_manager"]


def __getattr__(name: str) -> Any:
    # Not at once: the command line's help needs `discovery` alone.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from areal_core.plugins import manager

    return getattr(manager, name)
