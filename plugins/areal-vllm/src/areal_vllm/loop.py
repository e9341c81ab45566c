"""An event loop in a thread: where all HTTP of an engine happens, whichever loop or thread asks for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from areal_core.errors import ArealError

T = TypeVar("T")


class Loop:
    """Runs coroutines for other threads until ``stop``, which cancels those that are left."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._open, self._ending = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start it. Cancelling the future cancels it.

        Raises:
            ArealError: after ``stop``, which would not see it.
        """
        with self._open:
            if not self._ending:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise ArealError("the engine was destroyed")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it, and wait for it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call in the event loop's own thread")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run ``last``, and end the thread."""
        with self._open:
            ended, self._ending = self._ending, True
        if ended:
            last.close()
            return
        future = asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        try:
            future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
