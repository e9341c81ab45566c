"""SIGINT and SIGTERM: finish what must not be torn, save, and leave."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from areal_core.logging import getLogger

logger = getLogger("Trainer")


class Interrupted(Exception):
    """The run was asked to stop; everything is saved. Carries the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignal:
    """A context manager that notes the first SIGINT or SIGTERM; the second one acts as it always does."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for signum in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[signum] = signal.signal(signum, self._note)
            except ValueError:
                # Not the main thread (a trainer embedded in another program): its owner handles signals.
                break
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def __call__(self) -> bool:
        """Whether the run should stop."""
        return self.signum is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            self.__exit__()
            signal.raise_signal(signum)
            return
        self.signum = signum
        logger.warning("%s: saving, then stopping. Send it again to stop at once.", signal.Signals(signum).name)
