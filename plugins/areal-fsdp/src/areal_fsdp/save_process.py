"""Checkpoints that are written by a process of their own, whose Python and disk do not hold up training.

The state is copied to shared memory, where the process reads it. torch.distributed.checkpoint plans and describes the
checkpoint as ever, in a thread that does nothing else but wait. The process is started by the first save, and kept.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_fsdp.save_worker import receive, send
from areal_fsdp.staging import SharedCopy

logger = getLogger("Checkpointer")

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from areal_fsdp.save_worker import main
main(int(sys.argv[2]))
"""
_STOP_SECONDS = 3.0
_TAIL_BYTES, _TAIL_LINES = 4096, 8


class SaveProcess:
    """A child that writes one rank's file at a time. It ends with this object, and with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    @property
    def pid(self) -> int | None:
        """Of the child; None before the first save, and after the child has died."""
        return None if self._child is None else self._child.pid

    def write(self, request: dict[str, Any], segment: int) -> list[Any]:
        """Have a file written; see ``save_worker``. Returns when it is on the disk.

        Raises:
            OSError: if the disk refuses it.
            ArealError: if the child dies.
        """
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                logger.warning("%s; it had nothing to do, another one takes its place", self._bury())
            if self._child is None:
                self._start()
            try:
                send(self._socket, request, segment)
                answer, _ = receive(self._socket)
            except (EOFError, OSError):
                raise ArealError(self._bury()) from None
        failure = answer.get("error")
        if failure is None:
            written: list[Any] = answer["written"]
            return written
        if "errno" in failure:
            raise OSError(failure["errno"], os.strerror(failure["errno"]), failure["file"])
        raise ArealError(f"{failure['type']}: {failure['text']}")

    def close(self) -> None:
        """End the child, at once."""
        if self._end is not None:
            self._end()
        self._child = self._end = None

    def _start(self) -> None:
        # Import ignores what is no text, e.g. a Path.
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        self._socket, theirs = socket.socketpair()
        self._words: Any = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, json.dumps(path), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                    # Ctrl-C on the terminal is the parent's to handle.
                    process_group=0,
                )
        except BaseException:
            self._socket.close()
            self._words.close()
            raise
        # Also when this process ends.
        self._end = weakref.finalize(self, _stop, self._child, self._socket, self._words)

    def _bury(self) -> str:
        """Take leave of a child that hung up: what became of it."""
        child = self._child
        assert child is not None
        try:
            code = child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        if code >= 0:
            status = f"ended with exit code {code}"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            status = f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _TAIL_BYTES))
        words = self._words.read().decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
        self.close()
        said = "; the last it said: " + " / ".join(words) if words else ""
        return f"the process {child.pid} that writes checkpoints {status}{said}"


def _stop(child: subprocess.Popen[bytes], sock: socket.socket, words: Any) -> None:
    # The child ends when the socket is closed.
    sock.close()
    words.close()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


_shared: weakref.ref[SaveProcess] | None = None


def shared_save_process() -> SaveProcess:
    """The one of this process, for all its engines. It ends when none of them holds it any more."""
    global _shared
    process = None if _shared is None else _shared()
    if process is None:
        process = SaveProcess()
        _shared = weakref.ref(process)
    return process


class ProcessWriter(dcp.FileSystemWriter):
    """torch's writer for ``async_save``: the same files, written by a ``SaveProcess``. Tensors only."""

    def __init__(self, path: str, process: SaveProcess) -> None:
        super().__init__(path)
        self._process = process
        self._staged: SharedCopy | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._staged = SharedCopy(state_dict)
        return self._staged.tensors

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        staged, self._staged = self._staged, None
        assert staged is not None
        try:
            items = []
            for item in plan.items:
                tensor, data = planner.resolve_data(item), item.tensor_data
                assert isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and data is not None
                items.append(
                    {
                        "name": item.index.fqn,
                        "index": item.index.index,
                        "kind": item.type.name,
                        "start": list(data.chunk.offsets),
                        "shape": list(tensor.shape),
                        "whole": list(data.size),
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "offset": staged.offset(tensor),
                    }
                )
            request = {"path": str(self.path), "prefix": plan.storage_data.prefix, "size": staged.size, "items": items}
            written = self._process.write(request, staged.descriptor)
        finally:
            staged.close()
        results = []
        for number, file, start, length in written:
            info = _StorageInfo(file, start, length)
            results.append(WriteResult(index=plan.items[number].index, size_in_bytes=length, storage_data=info))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future
