"""The life of a helper process that serves its parent over a socket."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable


def serve_parent(descriptor: int, serve: Callable[[socket.socket], None]) -> None:
    """Run ``serve`` until it returns or the parent is gone; never returns itself.

    ``EOFError`` and ``ConnectionError`` mean that the parent hung up. Any other exception goes to stderr, and the exit
    code is 1. stdout becomes stderr: what libraries print must not end up in the output of a command.

    Args:
        descriptor: of the socket to the parent.
        serve: gets the socket.
    """
    # Ctrl-C, and a scheduler that tells every process of a job to stop, are the parent's to handle: it may still need
    # this process, for the last checkpoint, say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    sock = socket.socket(fileno=descriptor)
    threading.Thread(target=_exit_with_parent, args=(sock,), name="parent-watch", daemon=True).start()
    code = 0
    try:
        serve(sock)
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        # Without taking torch down, which takes long and may hang while it computes.
        os._exit(code)


def _exit_with_parent(sock: socket.socket) -> None:
    # A hung-up socket is reported whatever is asked for. The parent's id also catches a parent whose end of the socket
    # was inherited by somebody else.
    parent = os.getppid()
    poll = select.poll()
    poll.register(sock, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)
