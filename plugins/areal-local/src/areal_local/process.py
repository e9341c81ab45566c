"""Generation in a process of its own, which the trainer's GIL and threads cannot stall.

One ``GenerationProcess`` is one child and the thread that talks to it (see ``remote`` for what the engine sees).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_local.generation import Done, resolve_futures
from areal_local.rows import Pending
from areal_local.wire import FrameReader, error_from_plain, frame, pack_requests, unpack_answers

_logger = getLogger("LocalProcess")

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from areal_local.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_STOP_SECONDS = 3.0
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16384, 12, 300


class GenerationProcessError(ArealError):
    """The generation process ended by itself. Its requests may be sent again."""


def _import_path() -> list[str]:
    """This process's ``sys.path``, for another."""
    # Import ignores what is no text, e.g. a Path.
    return [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]


class GenerationProcess:
    """One child. Everything it says is handled in one thread, which also writes to it.

    Args:
        setup: the first frame (see ``serving``).
        segment: descriptor of the shared weights, inherited.
        on_end: called once in the thread when the child ended by itself, before its requests fail.
    """

    def __init__(self, setup: dict[str, Any], segment: int, on_end: Callable[[GenerationProcess], None]) -> None:
        self.on_end = on_end
        self.ready: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self.error: ArealError | None = None
        self.answered = 0
        self.stopping = False
        self._lock = threading.Lock()
        self._outbox: deque[bytes | tuple[Pending, int]] = deque()
        self._requests: dict[int, Pending] = {}
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._next_call = 0
        self._ended = False
        self._tokenizers: list[Any] = []
        self._folders: list[str] = []
        self._tail = bytearray()
        self._frames = FrameReader()
        self._out = memoryview(b"")
        self._socket, theirs = socket.socketpair()
        self._wake_read, self._wake_write = socket.socketpair()
        self._awake = False
        try:
            with theirs:
                path = json.dumps(_import_path())
                self.popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, path, str(theirs.fileno()), str(segment)],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), segment),
                    # Ctrl-C on the terminal is the parent's to handle.
                    process_group=0,
                )
        except BaseException:
            self._close()
            raise
        self._outbox.append(frame({"op": "setup", **setup}))
        self._thread = threading.Thread(target=self._run, name="areal-local-process", daemon=True)
        self._thread.start()
        self._wake()

    # ------------------------------------------------------------------------------- called from other threads

    def submit(self, pending: Pending) -> bool:
        """Send a request; False if the child has ended."""
        with self._lock:
            if self._ended:
                return False
            tokenizer = self._tokenizer(pending.tokenizer) if pending.request.gconfig.stop else -1
            self._requests[pending.number] = pending
            self._outbox.append((pending, tokenizer))
        self._wake()
        return True

    def cancel(self, pending: Pending) -> None:
        with self._lock:
            if self._requests.pop(pending.number, None) is None:
                return
            self._outbox.append(frame({"op": "cancel"}, {"number": np.array([pending.number], np.int64)}))
        self._wake()

    def post(self, operation: str, **fields: Any) -> None:
        """Tell the child; what goes wrong there shows in the next call."""
        with self._lock:
            self._outbox.append(frame({"op": operation, **fields}))
        self._wake()

    def call(self, operation: str, timeout: float | None = None, **fields: Any) -> Any:
        """Tell the child, and wait for its answer.

        Raises:
            ArealError: what went wrong there, or that it has ended.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._ended:
                raise self.error or ArealError("the generation process was stopped")
            self._next_call += 1
            self._calls[self._next_call] = future
            self._outbox.append(frame({"op": operation, "call": self._next_call, **fields}))
        self._wake()
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise ArealError(f"the generation process did not answer to {operation!r} in {timeout:g} s") from None

    def stop(self) -> None:
        """End the child: at once where it answers, else by force."""
        self.stopping = True
        if self.ready.done():
            self.post("stop")
            self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            self.popen.kill()
            self._thread.join()

    def _tokenizer(self, tokenizer: Any) -> int:
        """Number of a tokenizer that the child has, or finds in a folder before the request that needs it."""
        for number, known in enumerate(self._tokenizers):
            if known is tokenizer:
                return number
        if not hasattr(tokenizer, "save_pretrained"):
            raise BadInputError(
                f"gconfig.stop: rollout.local.process needs a Hugging Face tokenizer for stop strings, got a "
                f"{type(tokenizer).__name__}. Use stop_token_ids, or rollout.local.process=false."
            )
        folder = tempfile.mkdtemp(prefix="areal-tokenizer-")
        self._folders.append(folder)
        tokenizer.save_pretrained(folder)
        self._tokenizers.append(tokenizer)
        number = len(self._tokenizers) - 1
        self._outbox.append(frame({"op": "tokenizer", "folder": folder, "number": number}))
        return number

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._wake_write.send(b"\0")

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        assert self.popen.stderr is not None
        stderr = self.popen.stderr.fileno()
        os.set_blocking(stderr, False)
        self._socket.setblocking(False)
        failure: BaseException | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ, self._read)
            selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
            selector.register(stderr, selectors.EVENT_READ, lambda: self._read_stderr(stderr))
            try:
                open_files = True
                while open_files:
                    for key, _ in selector.select():
                        if key.data() is False:
                            selector.unregister(key.fileobj)
                            open_files = key.fileobj is not self._socket and open_files
                    wanted = selectors.EVENT_READ | (0 if self._write() else selectors.EVENT_WRITE)
                    if open_files and selector.get_key(self._socket).events != wanted:
                        selector.modify(self._socket, wanted, self._read)
            except BaseException as error:
                _logger.exception("the thread of the generation process failed")
                failure = error
        self._end(stderr, failure)

    def _read(self) -> bool:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for header, arrays in self._frames.feed(data):
            operation = header["op"]
            if operation == "done":
                self._deliver(header, arrays)
            elif operation == "reply":
                future = self._calls.pop(header["call"])
                if "error" in header:
                    future.set_exception(error_from_plain(header["error"]))
                else:
                    future.set_result(header["result"])
            elif operation == "log":
                logging.getLogger(header["name"]).log(header["level"], "%s", header["text"])
            elif operation == "ready":
                self.ready.set_result(header)
            elif operation == "failed":
                self.error = error_from_plain(header["error"])
        return bool(data)

    def _deliver(self, header: dict[str, Any], arrays: dict[str, Any]) -> None:
        now = time.perf_counter()
        answers, errors = unpack_answers(header, arrays)
        done: list[Done] = []
        with self._lock:
            for answer in answers:
                pending = self._requests.pop(answer.number, None)
                if pending is not None:
                    pending.first_token = now - answer.decoding
                    parts = (answer.tokens, answer.logprobs, answer.versions, answer.reason, answer.supports)
                    done.append((pending, pending.response(*parts)))
            for number, error in errors:
                pending = self._requests.pop(number, None)
                if pending is not None:
                    done.append((pending, error))
        self.answered += len(answers)
        resolve_futures(done)

    def _read_stderr(self, stderr: int) -> bool:
        try:
            data = os.read(stderr, 1 << 16)
        except BlockingIOError:
            return True
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        for line in data.decode("utf-8", "replace").splitlines():
            _logger.info("%s", line, extra={"file_only": True})
        return bool(data)

    def _woken(self) -> bool:
        self._wake_read.recv(4096)
        return True

    def _write(self) -> bool:
        """Send what can be sent; False if something is left."""
        while True:
            if not self._out:
                # Before the look into the outbox: whoever adds to it afterwards wakes this thread again.
                self._awake = False
                self._out = memoryview(self._take_outbox())
                if not self._out:
                    return True
            try:
                self._out = self._out[self._socket.send(self._out) :]
            except BlockingIOError:
                return False
            except OSError:  # the end of the child shows in _read
                self._out = memoryview(b"")
                return True

    def _take_outbox(self) -> bytes:
        """Everything that waits, in order; requests that are neighbours go in one frame."""
        with self._lock:
            items, self._outbox = self._outbox, deque()
        frames: list[bytes] = []
        requests: list[tuple[Pending, int]] = []
        for item in (*items, b""):
            if not isinstance(item, bytes):
                requests.append(item)
                continue
            if requests:
                frames.append(pack_requests([pending for pending, _ in requests], [number for _, number in requests]))
                requests = []
            frames.append(item)
        return b"".join(frames)

    # ----------------------------------------------------------------------------------------------------- the end

    def _end(self, stderr: int, failure: BaseException | None) -> None:
        if failure is not None:
            self.popen.kill()
        try:
            self.popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        with contextlib.suppress(OSError):
            while self._read_stderr(stderr):
                pass
        if self.error is None and not self.stopping:
            self.error = GenerationProcessError(self._describe(failure))
        self.on_end(self)
        with self._lock:
            self._ended = True
            requests, self._requests = list(self._requests.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        error = self.error
        resolve_futures([(p, p.response([], [], [], "abort") if error is None else error) for p in requests])
        for future in (*calls, self.ready):
            if not future.done():
                future.set_exception(error or ArealError("the generation process was stopped"))
        self._close()

    def _describe(self, failure: BaseException | None) -> str:
        code = self.popen.returncode
        if failure is not None:
            status = f"was lost: {type(failure).__name__}: {failure}"
        elif code >= 0:
            status = f"ended with exit code {code}"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            status = f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
        lines = [line[:_LINE_LENGTH] for line in self._tail.decode("utf-8", "replace").splitlines() if line]
        # Of a crash (see faulthandler) the first lines tell most, of a traceback the last.
        crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        lines = lines[-_TAIL_LINES:] if crash is None else lines[crash : crash + _TAIL_LINES]
        said = "\n".join(["; the last it said:", *lines]) if lines else ""
        return f"the generation process {self.popen.pid} {status}{said}"

    def _close(self) -> None:
        import shutil

        for end in (self._socket, self._wake_read, self._wake_write):
            end.close()
        if getattr(self, "popen", None) is not None and self.popen.stderr is not None:
            self.popen.stderr.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
