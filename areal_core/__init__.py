"""AReaL's kernel: contracts, plugin registries, configuration, and the training loop.

Importing this package is cheap: it loads neither torch nor transformers, and the names below on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_core.errors import ArealError, BadInputError, ConfigError, PluginError
    from areal_core.hookspecs import hookimpl
    from areal_core.registration import API_VERSION, Registration

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "ArealError",
    "BadInputError",
    "ConfigError",
    "PluginError",
    "Registration",
    "__version__",
    "hookimpl",
]

_MODULES = {
    "API_VERSION": "registration",
    "ArealError": "errors",
    "BadInputError": "errors",
    "ConfigError": "errors",
    "PluginError": "errors",
    "Registration": "registration",
    "hookimpl": "hookspecs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
