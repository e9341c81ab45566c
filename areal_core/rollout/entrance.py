"""The trainer's way into the event loop that plays episodes: calls, and waiting."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from areal_core.errors import ArealError
from areal_core.rollout.episode import Job, RolloutInterrupted
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.runner import EpisodeRunner

_POLL_SECONDS = 0.1
_CANCEL_SECONDS = 2.0
_STOP_SECONDS = 5.0
_ALLOCATIONS = 20_000

T = TypeVar("T")


class _CalmCollector:
    """The garbage collector while episodes are played, by any number of controllers.

    What exists by then (libraries, models) lives as long as the run. Episodes allocate so many small objects, and leave
    hardly a reference cycle, that the collector would look through all of it again and again: a third of the rollout's
    time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = gc.get_threshold()

    def enter(self) -> None:
        with self._lock:
            gc.freeze()
            self._users += 1
            if self._users == 1:
                self._before = youngest, *others = gc.get_threshold()
                if youngest:  # 0: somebody has switched it off
                    gc.set_threshold(max(youngest, _ALLOCATIONS), *others)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                gc.unfreeze()
                gc.set_threshold(*self._before)


_calm = _CalmCollector()


class Entrance:
    """A runner in the event loop of a thread of its own, for another thread that blocks.

    Waiting methods ask ``should_stop`` (their own and that of the class) at least every 0.2 s.

    Args:
        make_runner: gets the event loop, and what the runner calls when a waiting thread should look again.
        should_stop: whether the run is to end.

    Raises:
        RolloutInterrupted: by waiting methods, when they are told to stop.
        ArealError: if the loop has ended, or of the runner's ``fatal``.
    """

    def __init__(self, make_runner: Callable[..., EpisodeRunner], should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._wake = threading.Event()
        self._thread = LoopThread("rollout", self._loop_ended)
        self.runner = make_runner(self._thread.loop, self._notify)
        self._thread.start()
        _calm.enter()

    def end(self) -> bool:
        """Cancel everything that runs, and end the thread; False if something blocks it."""
        _calm.leave()
        return self._thread.end(self.runner.shut_down(), lambda: self.runner.progress, _STOP_SECONDS)

    def _notify(self) -> None:
        # Setting an event that is set costs as much as all else at the end of an episode.
        if not self._wake.is_set():
            self._wake.set()

    def _loop_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.runner.watch.stop_for(error)
        self._wake.set()

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn`` in the event loop's thread, and wait for it."""
        return self._thread.call(fn, *args)

    def call_unless(self, should_stop: Callable[[], bool] | None, fn: Callable[..., T], *args: Any) -> T:
        """As ``call``, for waiting methods: a workflow may block the event loop."""
        return self._thread.call(fn, *args, check=lambda: self.raise_if_told(should_stop))

    def cancel(self, job: Job) -> None:
        """Cancel ``job``; with a limit: a workflow that blocks the event loop must not keep the run from ending."""
        with contextlib.suppress(concurrent.futures.TimeoutError, ArealError):
            self._thread.post(self.runner.cancel_job, job).result(timeout=_CANCEL_SECONDS)

    def raise_if_told(self, should_stop: Callable[[], bool] | None) -> None:
        """For loops whose waits may all be over at the first look."""
        if self._should_stop() or (should_stop is not None and should_stop()):
            raise RolloutInterrupted("the run was told to stop while it waited for episodes")

    def wait(self, done: Callable[[], bool], should_stop: Callable[[], bool] | None, limit: float = 1e18) -> None:
        """Wait until ``done`` (cheap, reads the runner's counters) or a fatal error, at most ``limit`` seconds."""
        end = time.monotonic() + limit
        while True:
            self._wake.clear()
            if self.runner.fatal is not None:
                raise self.runner.fatal
            if done() or time.monotonic() > end:
                return
            self._thread.raise_if_dead()
            self.raise_if_told(should_stop)
            self._wake.wait(_POLL_SECONDS)
