"""``metrics.jsonl``: one line per call, readable while the run goes on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from areal_core.errors import BadInputError
from areal_core.runs.jsonlines import dumps, iter_json_lines, rewrite_json_lines

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Appends lines ``{"step": .., "time": .., name: value, ...}``; each is flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinities are written as null."""
        line = dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n"
        with self._lock:
            if self._file is None:
                self._file = open(self.path, "ab")  # noqa: SIM115 - stays open between steps
            self._file.write(line.encode("utf-8", errors="replace"))
            self._file.flush()

    def truncate(self, step: float) -> None:
        """Drop the lines of later steps, atomically, and a torn last line."""
        with self._lock:
            self._close()
            if self.path.exists():
                rewrite_json_lines(self.path, lambda line: int(line.get("step", 0)) <= step)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, one dict per step in order; lines of the same step are merged, the later one wins.

    Raises:
        BadInputError: if the file is damaged.
    """
    path = run_path / METRICS_FILE
    if not path.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for line in iter_json_lines(path):
        step = line.get("step")
        if not isinstance(step, int):
            raise BadInputError(f"{path}: a line has no whole number 'step'. The file is damaged.")
        steps.setdefault(step, {}).update(line)
    return [steps[step] for step in sorted(steps)]


def best_metric(rows: list[dict[str, Any]], name: str, mode: str) -> tuple[int, float] | None:
    """Step and value of the best entry of a metric; the first among equals. None if it never occurred."""
    sign = 1 if mode == "max" else -1
    found: tuple[int, float] | None = None
    for row in rows:
        value = row.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if found is None or sign * value > sign * found[1]:
            found = (int(row["step"]), float(value))
    return found
