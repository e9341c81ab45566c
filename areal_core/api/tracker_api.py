"""Trackers: where metrics go beside ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from areal_core.api.run_api import RunInfo


class Tracker(Protocol):
    """Constructed as ``Tracker(run: RunInfo, **options)`` on global rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics; must not block for long, and may raise (it is logged, not fatal)."""
        ...

    def close(self) -> None: ...


class TrackerFactory(Protocol):
    def __call__(self, run: RunInfo, **options: Any) -> Tracker: ...
