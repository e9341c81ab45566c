"""The program of one reward process; run by path, never imported by the kernel.

It needs the standard library only, so that a worker starts in milliseconds and loads torch only if the reward does.
Protocol, over one socket that the parent made: frames of ``<id: u64><length: u32>`` and a pickle come in (the first one
says what to import), answers ``<id: u64><code: u8><value: f64><length: u32>`` and a UTF-8 message go out, one per call
and in order. What is unpickled here comes from the parent process only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import numbers
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

REQUEST = struct.Struct("<QI")
ANSWER = struct.Struct("<QBdI")
OK, RAISED, EXITED, NONE, NAN, INF, TYPE, READY, BROKEN = range(9)
#: Training holds rewards in 32 bits; what is beyond them would arrive there as infinity.
LARGEST = 3.4028234663852886e38


def classify(value: Any) -> tuple[int, float, str]:
    """(code, value, message) of what a reward returned.

    A real number is one of Python's or numpy's integers and floats (whatever registers as ``numbers.Real``), but not a
    bool: a reward that answers True usually forgot to convert, and one that answers a tensor forgot ``.item()``.
    """
    if type(value) is not float:
        if value is None:
            return NONE, 0.0, "returned None"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return TYPE, 0.0, f"returned a {type(value).__name__}: {_short(value)}"
        try:
            value = float(value)
        except OverflowError:
            return INF, 0.0, "returned an integer too large for a float"
    if -LARGEST <= value <= LARGEST:
        return OK, value, ""
    if math.isfinite(value):
        return INF, 0.0, f"returned {value}, too large for a 32-bit float"
    return (NAN, 0.0, "returned NaN") if math.isnan(value) else (INF, 0.0, f"returned {value}")


def describe(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {_short(error, str)}"


def describe_call(error: BaseException) -> str:
    """As ``describe``, with the line of the function's own file that an exception came from.

    Caught where the function was called, so that the outermost frame is the caller's.
    """
    frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
    file = "" if frame is None else frame.tb_frame.f_code.co_filename
    line = 0
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == file:
            line = frame.tb_lineno
        frame = frame.tb_next
    return describe(error) + (f" ({os.path.basename(file)}, line {line})" if line else "")


def _short(value: Any, show: Callable[[Any], str] = repr) -> str:
    try:
        text = show(value)
    except Exception:
        text = "?"
    return text if len(text) <= 300 else text[:297] + "..."


def call(fn: Callable[..., Any], args: tuple[Any, ...], data: dict[str, Any]) -> tuple[int, float, str]:
    """Run a reward once; nothing it raises gets out."""
    try:
        return classify(fn(*args, **data))
    except SystemExit as error:
        return EXITED, 0.0, f"called sys.exit({_short(error.code)})"
    except BaseException as error:
        return RAISED, 0.0, describe_call(error)


def load(module: str, qualname: str, file: str | None) -> Callable[..., Any]:
    """Import a function by name, or from the file it was loaded from where the name is not importable."""
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing_itself = error.name is not None and (module == error.name or module.startswith(error.name + "."))
        spec = importlib.util.spec_from_file_location(module, file) if file and missing_itself else None
        if spec is None or spec.loader is None:
            raise
        target = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(target)
    for name in qualname.split("."):
        target = getattr(target, name)
    return target  # type: ignore[no-any-return]


def _exit_with_parent(sock: socket.socket) -> None:
    # A hung-up socket is reported whatever is asked for. The parent's id also catches a parent whose end of the
    # socket was inherited by somebody else.
    parent = os.getppid()
    poll = select.poll()
    poll.register(sock, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a reward writes must not end up in the output of a command such as `areal reward try --json`.
    os.dup2(2, 1)
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_with_parent, args=(sock,), daemon=True).start()
    reader = sock.makefile("rb", buffering=1 << 16)

    def answer(call_id: int, code: int, value: float = 0.0, message: str = "") -> None:
        text = message.encode("utf-8", "replace")
        sock.sendall(ANSWER.pack(call_id, code, value, len(text)) + text)

    def read() -> tuple[int, bytes]:
        header = reader.read(REQUEST.size)
        if len(header) < REQUEST.size:
            raise EOFError
        call_id, length = REQUEST.unpack(header)
        return call_id, reader.read(length)

    with contextlib.suppress(EOFError, ConnectionError):
        _, payload = read()
        try:
            setup = pickle.loads(payload)  # noqa: S301 - from the parent
            sys.path[:] = setup["path"]
            fn = load(*setup["target"])
            args, keywords = pickle.loads(setup["bound"])  # noqa: S301 - from the parent
            if args or keywords:
                fn = functools.partial(fn, *args, **keywords)
        except BaseException as error:
            answer(0, BROKEN, 0.0, describe(error))
            return
        answer(0, READY)
        while True:
            call_id, payload = read()
            try:
                arguments, data = pickle.loads(payload)  # noqa: S301 - from the parent
            except BaseException as error:
                answer(call_id, RAISED, 0.0, describe(error))
                continue
            answer(call_id, *call(fn, arguments, data))


if __name__ == "__main__":
    main()
