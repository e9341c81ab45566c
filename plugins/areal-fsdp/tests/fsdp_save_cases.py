"""Requests to the process that writes checkpoints, and accidents in it; also imported by trainers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_fsdp import save_process
from areal_fsdp.staging import SharedCopy

#: What a child does after it has written some tensor: {act}.
_HOOK = """
import os, signal
from torch.distributed.checkpoint import filesystem
write_item, count = filesystem._write_item, 0
def hooked(transforms, stream, *rest):
    global count
    result = write_item(transforms, stream, *rest)
    count += 1
    if count == 3:
        stream.flush()
        {act}
    return result
filesystem._write_item = hooked
"""


def with_hook(act: str) -> str:
    """The program of a child that does something in the middle of its first file."""
    start, call, rest = save_process._PROGRAM.rpartition("main(")
    return start + _HOOK.format(act=act) + call + rest


def request_of(folder: Path, copy: SharedCopy) -> dict[str, Any]:
    items = [
        {
            "name": name,
            "index": None,
            "kind": "TENSOR",
            "start": [0] * tensor.ndim,
            "shape": list(tensor.shape),
            "whole": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "offset": copy.offset(tensor),
        }
        for name, tensor in copy.tensors.items()
    ]
    return {"path": str(folder), "prefix": "__0_", "size": copy.size, "items": items}
