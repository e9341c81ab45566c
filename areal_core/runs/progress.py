"""Progress of a run: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from areal_core.logging import getLogger
from areal_core.runs.headline import format_number, format_seconds, headline, sparkline

logger = getLogger("Progress")

_SMOOTHING = 0.2


class Progress:
    """Shows how far a run is and how it goes.

    On a terminal, a bar at the bottom; log lines appear above it. Elsewhere a log line per step. The log file gets the
    lines in both cases.

    Args:
        total: the last step.
        initial: steps done before, for a resumed run.
        title: shown before the bar.
        live: draw a bar; None: only if stderr is a terminal.
    """

    def __init__(self, total: int, initial: int = 0, title: str = "", live: bool | None = None) -> None:
        self.total, self.title = total, title
        self._step = initial
        self._rewards: deque[float] = deque(maxlen=120)
        self._shown: dict[str, float] = {}
        self._last_time = time.monotonic()
        self._seconds_per_step: float | None = None
        self._updates = 0
        self._bar: Any = None
        self._task: Any = None
        if sys.stderr.isatty() if live is None else live:
            self._start_bar()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        now = time.monotonic()
        done = step - self._step
        if done > 0:
            seconds = (now - self._last_time) / done
            before = self._seconds_per_step
            self._updates += 1
            # The first step also warms caches and compiles, so the second replaces its time.
            average = before is not None and self._updates > 2
            self._seconds_per_step = before + _SMOOTHING * (seconds - before) if average and before else seconds
        self._last_time, self._step = now, step
        new = headline(metrics)
        self._shown |= new
        if "reward" in new:
            self._rewards.append(new["reward"])
        logger.info("%s", self.line(new), extra={"file_only": self._bar is not None})
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=self._status())

    def message(self, text: str) -> None:
        """Log a line; it appears above the bar."""
        logger.info("%s", text)

    def close(self) -> None:
        """Stop drawing; what was drawn last stays. May be called twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    @property
    def eta(self) -> float | None:
        """Seconds left, by the recent pace; None before the first step and after the last."""
        if self._seconds_per_step is None or self._step >= self.total:
            return None
        return self._seconds_per_step * (self.total - self._step)

    def line(self, shown: Mapping[str, float]) -> str:
        """``step 12/40  reward 0.61  eval 0.93  loss 0.012  310 tok/s  eta 0:34``."""
        parts = [f"step {self._step}/{self.total}"]
        parts += [f"{label} {format_number(value)}" for label, value in shown.items() if label != "tok/s"]
        if "tok/s" in shown:
            parts.append(f"{format_number(shown['tok/s'])} tok/s")
        if self.eta is not None:
            parts.append(f"eta {format_seconds(self.eta)}")
        return "  ".join(parts)

    def _status(self) -> str:
        shown = self._shown
        parts = []
        if "reward" in shown:
            parts.append(f"reward [bold]{format_number(shown['reward'])}[/] [magenta]{sparkline(self._rewards)}[/]")
        elif "loss" in shown:
            parts.append(f"loss [bold]{format_number(shown['loss'])}[/]")
        parts += [
            f"{label} [bold]{format_number(shown[label])}[/]" for label in ("eval", "eval loss") if label in shown
        ]
        if "tok/s" in shown:
            parts.append(f"{format_number(shown['tok/s'])} tok/s")
        parts.append(f"eta {format_seconds(self.eta)}" if self.eta is not None else "")
        return "  ".join(part for part in parts if part)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        # One refresh a second: drawing must not take the interpreter from an engine in this process.
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),
            refresh_per_second=1,
        )
        self._task = self._bar.add_task(escape(self.title), total=self.total, completed=self._step, status="starting")
        self._bar.start()
