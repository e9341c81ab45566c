"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_PREFIX = ".tmp-"


def _fsync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # Some network file systems cannot sync a directory; the rename is still atomic.
        pass
    finally:
        os.close(descriptor)


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no reader looks at and that :func:`clean_leftovers` removes."""
    return path.with_name(f"{_PREFIX}{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing; it takes its name only when the block ends without an exception.

    Args:
        path: the file; replaced if it exists.
        mode: ``"w"`` (UTF-8 text) or ``"wb"``.
    """
    path = Path(path)
    if mode not in ("w", "wb"):
        raise ValueError(f"mode must be 'w' or 'wb', got {mode!r}")
    temporary = temporary_beside(path)
    try:
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _fsync_dir(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill; it takes its name only when the block ends without an exception.

    Args:
        path: the folder; its parent is made if missing.
        overwrite: replace a folder of that name instead of failing.

    Raises:
        FileExistsError: if ``path`` exists and may not be replaced.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                _fsync_file(Path(folder) / name)
            _fsync_dir(Path(folder))
        replaced = None
        if path.exists():
            replaced = temporary_beside(path)
            os.rename(path, replaced)
        os.rename(temporary, path)
        _fsync_dir(path.parent)
        if replaced is not None:
            remove(replaced)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds; nothing happens if it is gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clean_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written directly in ``folder``."""
    for leftover in folder.glob(f"{_PREFIX}*"):
        remove(leftover)
