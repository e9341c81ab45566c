"""Plugins: discovery by entry point, isolation of broken ones, and names to implementations."""

from __future__ import annotations

from areal_core.plugins.manager import PluginManager, get_plugin_manager

__all__ = ["PluginManager", "get_plugin_manager"]
