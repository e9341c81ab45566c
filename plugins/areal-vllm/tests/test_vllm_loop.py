"""The event loop in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from areal_core.errors import ArealError
from areal_vllm.loop import Loop


async def nothing() -> None:
    return


async def forever() -> None:
    await asyncio.Event().wait()


def test_stop_when_something_runs_cancels_it() -> None:
    loop = Loop("test")
    future = loop.submit(forever())

    loop.stop(nothing())

    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=10)


def test_submit_while_the_loop_is_being_stopped_refuses() -> None:
    loop = Loop("test")
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(loop.submit(forever()))
        except ArealError as error:
            found.append(str(error))

    async def last() -> None:
        # Another thread asks after everything that ran was cancelled: nobody would ever answer it.
        await asyncio.to_thread(ask)

    loop.stop(last())

    assert found == ["the engine was destroyed"]


def test_stop_when_it_is_called_twice_runs_the_last_coroutine_once() -> None:
    loop = Loop("test")
    runs: list[int] = []

    async def last() -> None:
        runs.append(1)

    loop.stop(last())
    loop.stop(last())

    assert runs == [1]
