"""An event loop in a thread of its own, and the way into it from another thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal_core.errors import ArealError

_POLL_SECONDS = 0.1

T = TypeVar("T")


class LoopThread:
    """Runs an event loop until ``end``.

    A task that raises ``SystemExit`` or ``KeyboardInterrupt`` would end an event loop, and so all its other tasks. This
    one goes on: as with any other exception, only who awaits the task hears of it.

    Args:
        name: of the thread, and in messages.
        on_end: called in the thread when the loop has ended, with the error that ended it, if any.
    """

    def __init__(self, name: str, on_end: Callable[[BaseException | None], None]) -> None:
        self.loop = asyncio.new_event_loop()
        self._name, self._on_end = name, on_end
        self._error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def raise_if_dead(self) -> None:
        if not self._thread.is_alive():
            raise ArealError(f"the {self._name}'s event loop has ended") from self._error

    def call(self, fn: Callable[..., T], *args: Any, check: Callable[[], None] | None = None) -> T:
        """Run ``fn`` in the loop's thread, and wait for it.

        Args:
            check: called every 0.1 s while something else keeps the loop; may raise. ``fn`` is not run then.

        Raises:
            ArealError: if the loop has ended.
        """
        future = self.post(fn, *args)
        try:
            while True:
                try:
                    return future.result(timeout=_POLL_SECONDS)
                except concurrent.futures.TimeoutError:
                    if future.done():  # That of ``fn``, or it ended at this very moment.
                        return future.result()
                self.raise_if_dead()
                if check is not None and not future.running():
                    check()
        except BaseException:
            future.cancel()
            raise

    def post(self, fn: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
        """Have ``fn`` run in the loop's thread."""
        self.raise_if_dead()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args))
            except BaseException as error:
                future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(run)
        except RuntimeError as error:  # It was closed since.
            raise ArealError(f"the {self._name}'s event loop has ended") from (self._error or error)
        return future

    def end(self, last: Coroutine[Any, Any, None], progress: Callable[[], int], patience: float) -> bool:
        """Run ``last``, stop the loop, and wait for the thread; returns whether it ended.

        Args:
            progress: a number that changes as long as something happens.
            patience: seconds to wait without progress.
        """
        finish = self._finish(last)
        try:
            asyncio.run_coroutine_threadsafe(finish, self.loop)
        except RuntimeError:  # The loop is closed.
            finish.close()
            last.close()
        before, since = -1, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < patience:
            self._thread.join(_POLL_SECONDS)
            now = progress()
            if now != before:
                before, since = now, time.monotonic()
        return not self._thread.is_alive()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await last
        finally:
            self._over = True
            self.loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._over:
                # The task keeps its exception, for who awaits it.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except BaseException as error:
            self._error = error
        finally:
            with contextlib.suppress(Exception):
                self.loop.close()
            self._on_end(self._error)
