"""JSON Lines that a killed process cannot spoil: NaN becomes null, and a torn last line is skipped."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from areal_core.errors import BadInputError
from areal_core.runs.files import atomic_write


def to_json_value(value: Any) -> Any:
    """Plain JSON data: NaN and infinities become null, scalars of numpy and torch numbers, paths and others strings."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars
        return to_json_value(value.tolist())
    return str(value)


_OPTIONS: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
# Nearly every line is plain data already, and the encoder checks that faster than we could.
_ENCODER = json.JSONEncoder(default=to_json_value, **_OPTIONS)


def dumps(value: Any) -> str:
    """One line of valid JSON."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a key that is no text, a NaN
        return json.dumps(to_json_value(value), **_OPTIONS)


def open_lines(path: Path) -> IO[bytes]:
    """Open a ``.jsonl`` or ``.jsonl.zst`` file for reading bytes."""
    if path.suffix != ".zst":
        return open(path, "rb")
    import zstandard

    return io.BufferedReader(zstandard.open(path, "rb"))


def iter_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file (plain or zstd), without a torn last line.

    Raises:
        BadInputError: if a line before the last is no JSON object; names file and line.
    """
    bad: int | None = None
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            if bad is not None:
                raise BadInputError(
                    f"{path}:{bad}: not a JSON object. The file is damaged; restore it or move it away."
                )
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                bad = number
            elif line.endswith(b"\n"):
                yield value


def rewrite_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only some lines of a plain or zstd file, atomically; a torn last line goes. An empty result stays a file."""
    kept: list[bytes] = []
    dropped = False
    with open_lines(path) as file:
        lines = file.readlines()
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if line.endswith(b"\n") and isinstance(value, dict) and keep(value):
            kept.append(line)
        else:
            dropped = True
    if not dropped:
        return
    data = b"".join(kept)
    if path.suffix == ".zst":
        import zstandard

        data = zstandard.ZstdCompressor().compress(data)
    with atomic_write(path, "wb") as out:
        out.write(data)
