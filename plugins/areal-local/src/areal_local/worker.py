"""Start of the generation process: nothing but the standard library, until the parent's end is watched for."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading


def main(socket_descriptor: int, segment: int) -> None:
    """Serve until the parent says stop, or is gone. Never returns.

    Args:
        socket_descriptor: of the connection to the parent.
        segment: descriptor of the shared weights.
    """
    # Ctrl-C, and a scheduler that tells every process of a job to stop, are the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What libraries print must not end up in the output of a command.
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    sock = socket.socket(fileno=socket_descriptor)
    threading.Thread(target=_exit_with_parent, args=(sock,), name="parent-watch", daemon=True).start()
    code = 0
    try:
        from areal_local.serving import Server

        Server(sock, segment).serve()
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        # Without taking torch down, which takes long and may hang while a step runs.
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
