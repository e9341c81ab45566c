"""Statistics of a step: sums with their denominators, extremes, counters and times, exported as one flat dict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

ReduceOp = Literal["sum", "min", "max"]
#: ``reduce(op, {name: value}) -> {name: value}`` over all ranks. Called on every rank with "sum", "min" and "max", in
#: this order, even with an empty dict. Ranks may hold different names; the result holds the names of all.
ReduceFn = Callable[[ReduceOp, dict[str, float]], dict[str, float]]


def _detached(value: Any) -> Any:
    """The value without its autograd graph; a tensor stays on its device, so that recording does not synchronise."""
    return value.detach() if hasattr(value, "detach") else value


class StatsTracker:
    """Collects what a step reports. Thread-safe.

    Values are numbers, or scalar tensors that are only read at :meth:`export`. Names are paths such as
    ``"actor/clip_fraction"``.

    Args:
        reduce: combines ranks in :meth:`export`; None for one process.
    """

    def __init__(self, reduce: ReduceFn | None = None) -> None:
        self.reduce = reduce
        self._lock = threading.Lock()
        self._scalars: dict[str, Any] = {}
        self._sums: dict[str, list[Any]] = {}
        self._minima: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._counters: dict[str, float] = {}
        self._times: dict[str, float] = {}

    def scalar(self, name: str, value: Any) -> None:
        """Report the last value recorded; over ranks, the mean of it."""
        with self._lock:
            self._scalars[name] = _detached(value)

    def scalars(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """Record several scalars, their names under ``prefix``."""
        for name, value in values.items():
            self.scalar(f"{prefix}/{name}" if prefix else name, value)

    def ratio(self, name: str, total: Any, count: Any) -> None:
        """Report ``sum(total) / sum(count)`` over all calls, micro-batches and ranks; nothing when the count is 0."""
        total, count = _detached(total), _detached(count)
        with self._lock:
            entry = self._sums.get(name)
            if entry is None:
                self._sums[name] = [total, count]
            else:
                # Not in place: the caller may still use the tensor it passed.
                entry[0], entry[1] = entry[0] + total, entry[1] + count

    def mean(self, name: str, value: Any) -> None:
        """Report the mean of the values, each counting once."""
        self.ratio(name, value, 1)

    def minimum(self, name: str, value: float) -> None:
        """Report the least value."""
        value = float(value)
        with self._lock:
            self._minima[name] = min(value, self._minima.get(name, value))

    def maximum(self, name: str, value: float) -> None:
        """Report the greatest value."""
        value = float(value)
        with self._lock:
            self._maxima[name] = max(value, self._maxima.get(name, value))

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter. Counters only grow, and are not reset by :meth:`export`.

        Raises:
            ValueError: if ``amount`` is negative.
        """
        if amount < 0:
            raise ValueError(f"counter {name!r} cannot fall: got {amount}. Use scalar() for a value that may.")
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to ``time/{name}_s``; over ranks, the slowest counts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - start)

    def add_time(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to ``time/{name}_s``."""
        with self._lock:
            self._times[name] = self._times.get(name, 0.0) + seconds

    def export(self, reset: bool = True) -> dict[str, float]:
        """Everything recorded, combined over ranks, as flat ``{name: float}`` in sorted order.

        Args:
            reset: forget all but the counters.
        """
        with self._lock:
            scalars, sums = dict(self._scalars), {k: (v[0], v[1]) for k, v in self._sums.items()}
            minima, maxima = dict(self._minima), dict(self._maxima)
            counters, times = dict(self._counters), dict(self._times)
            if reset:
                for store in (self._scalars, self._sums, self._minima, self._maxima, self._times):
                    store.clear()
        # Scalars are means over the ranks that hold them, hence sums with a count of one.
        added = {f"total:{k}": float(v[0]) for k, v in sums.items()}
        added |= {f"weight:{k}": float(v[1]) for k, v in sums.items()}
        added |= {f"total:{k}": float(v) for k, v in scalars.items()}
        added |= {f"weight:{k}": 1.0 for k in scalars}
        added |= {f"counter:{k}": float(v) for k, v in counters.items()}
        least = {k: float(v) for k, v in minima.items()}
        greatest = {f"max:{k}": float(v) for k, v in maxima.items()}
        greatest |= {f"time:{k}": v for k, v in times.items()}
        if self.reduce is not None:
            added, least, greatest = (
                self.reduce("sum", added),
                self.reduce("min", least),
                self.reduce("max", greatest),
            )
        result = dict(least)
        for key, value in (*added.items(), *greatest.items()):
            kind, _, name = key.partition(":")
            if kind == "total":
                weight = added[f"weight:{name}"]
                if weight != 0:
                    result[name] = value / weight
            elif kind == "time":
                result[f"time/{name}_s"] = value
            elif kind in ("counter", "max"):
                result[name] = value
        return dict(sorted(result.items()))

    def state_dict(self) -> dict[str, float]:
        """The counters, for a checkpoint."""
        with self._lock:
            return dict(self._counters)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the counters to those of a checkpoint."""
        with self._lock:
            self._counters = {name: float(value) for name, value in state.items()}
