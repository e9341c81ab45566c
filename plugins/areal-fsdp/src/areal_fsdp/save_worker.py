"""The process that writes checkpoints: nothing heavy until the parent's end is watched for.

It serves one socket. A request is a JSON frame, sent together with the descriptor of a segment of shared memory (see
``staging``); it says which tensors lie where in the segment, and what they are called. The answer is a JSON frame.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from typing import Any

from areal_core.child import serve_parent

LENGTH = struct.Struct("<Q")


def main(descriptor: int) -> None:
    """Serve until the parent is gone or wants no more. Never returns.

    Args:
        descriptor: of the socket to the parent.
    """
    serve_parent(descriptor, _serve)


def _serve(sock: socket.socket) -> None:
    while True:
        request, segment = receive(sock)
        send(sock, _answer(request, segment))


def send(sock: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send a frame, with an open file where one is given."""
    data = json.dumps(message).encode()
    header = LENGTH.pack(len(data))
    if descriptor is None:
        sock.sendall(header)
    else:
        socket.send_fds(sock, [header], [descriptor])
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """A frame and the descriptor that came with it (-1: none).

    Raises:
        EOFError: if the other side has hung up.
    """
    header, descriptors, _, _ = socket.recv_fds(sock, LENGTH.size, 1)
    header += _read(sock, LENGTH.size - len(header))
    (length,) = LENGTH.unpack(header)
    return json.loads(_read(sock, length)), descriptors[0] if descriptors else -1


def _read(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _answer(request: dict[str, Any], segment: int) -> dict[str, Any]:
    try:
        try:
            memory = mmap.mmap(segment, request["size"])
        finally:
            os.close(segment)
        return {"written": _write(request, memory)}
    except Exception as error:
        plain: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
        if isinstance(error, OSError) and error.errno is not None:
            plain |= {"errno": error.errno, "file": str(error.filename or request["path"])}
        return {"error": plain}


def _write(request: dict[str, Any], memory: mmap.mmap) -> list[Any]:
    """Write one rank's file as torch writes it: ``[number of the item, file, first byte, length]`` of each tensor."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    from areal_fsdp.staging import tensor_at

    torch.set_num_threads(1)
    tensors, numbers, items = {}, {}, []
    for number, plain in enumerate(request["items"]):
        dtype = getattr(torch, plain["dtype"])
        start, shape = torch.Size(plain["start"]), torch.Size(plain["shape"])
        index = MetadataIndex(plain["name"], start, plain["index"])
        chunk = ChunkStorageMetadata(start, shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(plain["whole"]))
        items.append(WriteItem(index, WriteItemType[plain["kind"]], tensor_data=data))
        tensors[index] = tensor_at(memory, plain["offset"], dtype, shape)
        numbers[index] = number

    class Planner:
        def resolve_data(self, item: WriteItem) -> torch.Tensor:
            return tensors[item.index]

    plan = SavePlan(items, storage_data=_StoragePrefix(request["prefix"]))
    planner: Any = Planner()
    results = dcp.FileSystemWriter(request["path"]).write_data(plan, planner).wait()
    stored = [(numbers[result.index], result.storage_data) for result in results]
    return [[number, info.relative_path, info.offset, info.length] for number, info in stored]
