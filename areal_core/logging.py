"""Loggers: PascalCase names, one colour per kind of component, the rank in a distributed run."""

from __future__ import annotations

import logging


def getLogger(name: str) -> logging.Logger:
    """The logger of one component, e.g. ``getLogger("FSDPEngine")``."""
    return logging.getLogger(f"areal.{name}")
