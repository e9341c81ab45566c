"""One process per run directory: a lock file with the owner's pid and start time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from areal_core.errors import BadInputError
from areal_core.runs.files import atomic_write

LOCK_FILE = ".lock"


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "start_time": psutil.Process().create_time(), "host": platform.node()}


def read_owner(run_path: Path) -> dict[str, Any] | None:
    """The process that a run's lock file names, dead or alive."""
    try:
        owner = json.loads((run_path / LOCK_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"pid", "start_time", "host"} <= owner.keys() else None


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether the owner still runs. A process of another host counts as alive: it cannot be asked."""
    if owner["host"] != platform.node():
        return True
    try:
        process = psutil.Process(int(owner["pid"]))
        # Pids are reused, so the start time decides.
        return abs(process.create_time() - float(owner["start_time"])) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def _critical_section(run_path: Path) -> Iterator[None]:
    """Serialises look-and-take between processes; the kernel ends it if the process dies."""
    descriptor = os.open(run_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def acquire(run_path: Path) -> None:
    """Take a run for this process. A lock whose owner is dead is taken over.

    Raises:
        BadInputError: if another live process holds it.
    """
    with _critical_section(run_path):
        owner = read_owner(run_path)
        me = _this_process()
        if owner is not None and owner != me and is_alive(owner):
            raise BadInputError(
                f"{run_path}: process {owner['pid']} on {owner['host']} is using this run. Wait for it or stop it, "
                f"or use another run.name. If that process is gone for certain, remove {run_path / LOCK_FILE}."
            )
        with atomic_write(run_path / LOCK_FILE) as out:
            json.dump(me, out)


def release(run_path: Path) -> None:
    """Give a run back, if this process holds it."""
    if not run_path.is_dir():
        return
    with _critical_section(run_path):
        if read_owner(run_path) == _this_process():
            (run_path / LOCK_FILE).unlink(missing_ok=True)
