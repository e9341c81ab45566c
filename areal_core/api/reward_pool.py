"""A pool of reward processes that an event loop talks to over sockets.

Calls are handed out a window at a time, so that a process never idles between two cheap calls; every answer is written
at once. The calls of a process are answered in order, so the one that hangs or ends it is always the first unanswered
one: that call fails, the others go to another process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from typing import Any

import attrs

from areal_core.api import reward_worker as wire
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger

Answer = tuple[int, float, str]

_STARTUP_TIMEOUT = 120.0
_MAX_STARTUP_FAILURES = 3
# How much work a process is given ahead: calls for about this long, by what the last ones took.
_WINDOW_SECONDS = 0.02
_MIN_WINDOW, _FIRST_WINDOW, _MAX_WINDOW = 2, 16, 512

logger = getLogger("RewardPool")
_live: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


@attrs.frozen
class Target:
    """A function that another process can import; ``bound`` is the pickled (args, keywords) of a partial."""

    module: str
    qualname: str
    file: str | None
    bound: bytes


class _Call:
    __slots__ = ("future", "id", "payload")

    def __init__(self, call_id: int, payload: bytes, future: asyncio.Future[Answer]) -> None:
        self.id, self.payload, self.future = call_id, payload, future


class ProcessPool:
    """Runs one function in up to ``size`` processes. Belongs to one event loop; ``close`` may be called anywhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: Target, timeout: float, size: int, name: str) -> None:
        self.loop, self.timeout, self.size, self.name = loop, timeout, size, name
        path = [os.getcwd() if entry == "" else entry for entry in sys.path]
        setup = {"path": path, "target": (target.module, target.qualname, target.file), "bound": target.bound}
        self._setup = _frame(0, _pickle(setup))
        self._processes: list[_Process] = []
        self._pending: deque[_Call] = deque()
        self._next_id = 0
        self._flush_scheduled = False
        self._startup_failures = 0
        self._broken: ArealError | None = None
        self.closed = False
        _live.add(self)

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def submit(self, payload: bytes) -> asyncio.Future[Answer]:
        """Queue one call; the future raises ``TimeoutError`` where it took too long."""
        future: asyncio.Future[Answer] = self.loop.create_future()
        if self._broken is not None:
            future.set_exception(self._broken)
            return future
        self._next_id += 1
        self._pending.append(_Call(self._next_id, payload, future))
        # At the end of this turn of the loop: a group's calls go out in one write.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self.flush)
        return future

    def flush(self) -> None:
        """Hand waiting calls to processes that have room."""
        self._flush_scheduled = False
        if self.closed:
            return
        while len(self._processes) < min(self.size, len(self._pending)):
            try:
                self._processes.append(_Process(self))
            except OSError as error:
                self.give_up(ArealError(f"reward {self.name!r}: cannot start a process: {error}"))
                return
        pending = self._pending
        while pending:
            process = min(self._processes, key=lambda p: len(p.queue) - p.window)
            room = process.window - len(process.queue)
            if room <= 0:
                break
            # Half of what is left at most, so that a second process gets its share.
            share = max(1, min(room, -(-len(pending) // len(self._processes))))
            calls: list[_Call] = []
            while pending and len(calls) < share:
                call = pending.popleft()
                if not call.future.done():
                    calls.append(call)
            process.send(calls)
        for process in self._processes:
            process.write()

    def lost(self, process: _Process, error: BaseException | None, answer: Answer | None = None) -> None:
        """``process`` is gone: fail the call it was at, give its other calls to another."""
        if process not in self._processes:
            return
        self._processes.remove(process)
        process.close()
        calls = [call for call in process.queue if not call.future.done()]
        if process.ready:
            if calls and calls[0] is process.queue[0]:
                future = calls.pop(0).future
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(answer or (wire.EXITED, 0.0, f"ended its process ({process.status()})"))
        elif not self.closed:
            self._startup_failures += 1
            if self._startup_failures >= _MAX_STARTUP_FAILURES:
                self._pending.extendleft(reversed(calls))
                status = error or process.status()
                self.give_up(ArealError(f"reward {self.name!r}: its processes end at start ({status})"))
                return
        self._pending.extendleft(reversed(calls))
        self.flush()

    def give_up(self, error: ArealError) -> None:
        """No process can run the function: every call, now and later, fails with ``error``."""
        self._broken = error
        for process in self._processes:
            process.close()
        calls = [*(call for process in self._processes for call in process.queue), *self._pending]
        self._processes.clear()
        self._pending.clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)

    def close(self) -> None:
        self.closed = True
        for process in list(self._processes):
            process.kill()
        _live.discard(self)
        if self.loop.is_closed():
            self._finish()
            return
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop or not self.loop.is_running():
            self._finish()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self.loop.is_closed():
            for process in self._processes:
                process.socket.close()
            return
        self.give_up(ArealError(f"reward {self.name!r} was shut down"))


class _Process:
    """One worker process, seen from the event loop."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool, self.loop = pool, pool.loop
        self.queue: deque[_Call] = deque()
        self.ready = False
        self.window = _FIRST_WINDOW
        self._out = bytearray(pool._setup)
        self._in = bytearray()
        self._writing = False
        self._closed = False
        self._began = self.loop.time()  # when the first call of the queue began
        self.socket, theirs = socket.socketpair()
        try:
            self.socket.setblocking(False)
            self.popen = subprocess.Popen(
                [sys.executable, "-P", wire.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C on the terminal is the parent's to handle.
                process_group=0,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.loop.add_reader(self.socket, self._readable)
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(_STARTUP_TIMEOUT, self._expire)
        self.write()

    def send(self, calls: list[_Call]) -> None:
        """Queue calls; ``write`` sends them."""
        if not calls:
            return
        if not self.queue and self.ready:
            self._began = self.loop.time()
        for call in calls:
            self._out += _frame(call.id, call.payload)
        self.queue.extend(calls)
        if self._timer is None:
            self._timer = self.loop.call_later(self.pool.timeout, self._expire)

    def write(self) -> None:
        if self._closed or not self._out:
            return
        with contextlib.suppress(BlockingIOError, OSError):  # an end of the process shows in _readable
            sent = self.socket.send(self._out)
            del self._out[:sent]
        if bool(self._out) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self.loop.add_writer(self.socket, self.write)
            else:
                self.loop.remove_writer(self.socket)

    def _readable(self) -> None:
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.kill()
            self.pool.lost(self, None)
            return
        self._in += data
        self._parse()

    def _parse(self) -> None:
        data, header = self._in, wire.ANSWER
        position = answered = 0
        while len(data) - position >= header.size:
            call_id, code, value, length = header.unpack_from(data, position)
            end = position + header.size + length
            if len(data) < end:
                break
            message = data[end - length : end].decode("utf-8", "replace") if length else ""
            position = end
            if code == wire.READY:
                self._set_ready()
            elif code == wire.BROKEN:
                self.pool.give_up(
                    BadInputError(f"reward {self.pool.name!r} cannot be imported in a process of its own: it {message}")
                )
                return
            else:
                call = self.queue.popleft()
                assert call.id == call_id, "answers come in the order of the calls"
                answered += 1
                if not call.future.done():
                    call.future.set_result((code, value, message))
        del data[:position]
        if answered:
            now = self.loop.time()
            each = (now - self._began) / answered
            self._began = now
            self.window = max(_MIN_WINDOW, min(_MAX_WINDOW, int(_WINDOW_SECONDS / max(each, 1e-6))))
            if self.pool._pending and 2 * len(self.queue) <= self.window:
                self.pool.flush()

    def _set_ready(self) -> None:
        self.ready = True
        self.pool._startup_failures = 0
        self._began = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.pool.timeout, self._expire) if self.queue else None

    def _expire(self) -> None:
        self._timer = None
        if self.ready:
            if not self.queue:
                return
            left = self._began + self.pool.timeout - self.loop.time()
            if left > 0:
                self._timer = self.loop.call_later(left, self._expire)
                return
        self.kill()
        self.pool.lost(self, TimeoutError(f"not ready after {_STARTUP_TIMEOUT:g} s" if not self.ready else ""))

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5.0)

    def status(self) -> str:
        code = self.popen.poll()
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.loop.remove_reader(self.socket)
        if self._writing:
            self.loop.remove_writer(self.socket)
        self.socket.close()
        self.kill()


def _frame(call_id: int, payload: bytes) -> bytes:
    return wire.REQUEST.pack(call_id, len(payload)) + payload


def _pickle(value: Any) -> bytes:
    import pickle

    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


@atexit.register
def _end_all() -> None:
    for pool in list(_live):
        pool.closed = True
        for process in list(pool._processes):
            process.kill()
