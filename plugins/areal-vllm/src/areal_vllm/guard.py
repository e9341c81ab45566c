"""Runs one server as a child, and takes all of its processes down with it: ``python guard.py COMMAND...``.

A program of its own, so that a server ends with the trainer however the trainer ends. It ends the server when its
standard input closes, when its parent is gone, or on SIGTERM; and what the server leaves behind when it ends by itself.
Its exit code is the server's, or 128 and the number of the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 8.0


def main(command: list[str]) -> int:
    parent = os.getppid()
    _adopt_orphans()
    stopping = False

    def stop(signum: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    # On a terminal Ctrl-C goes to the trainer, which then closes our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not stopping:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], _POLL_SECONDS)
        if (readable and not os.read(sys.stdin.fileno(), 4096)) or os.getppid() != parent:
            stopping = True
    _end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _adopt_orphans() -> None:
    """Processes of the server whose parent dies become ours instead of init's, where we would lose them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(child: subprocess.Popen[bytes]) -> None:
    me = psutil.Process()
    with contextlib.suppress(psutil.Error):
        if child.poll() is None:
            child.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while child.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(deadline - time.monotonic())
        if child.poll() is None:
            child.kill()
            child.wait()
        # Twice: a process may have been started between the list and the signal.
        for _ in range(2):
            left = me.children(recursive=True)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=2)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
