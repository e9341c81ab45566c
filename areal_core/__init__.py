"""AReaL's kernel: contracts, plugin registries, configuration, and the training loop.

Importing this package is cheap: it loads neither torch nor transformers.
"""

from __future__ import annotations

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
