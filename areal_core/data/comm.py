"""Batches and small messages between processes: JSON headers and raw tensors, nothing pickled.

Every function is collective over ``group``; ``src`` and ``dst`` are ranks *within* it. A group of None means a single
process, where nothing is sent. Tensors travel in the memory that the group's backend works on and arrive there: host
memory with gloo, the current CUDA device with NCCL.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_core.api.batch import PackedBatch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: The types a tensor may have on the wire, by their number in a header.
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_MAX_DIMS = 6
#: Every tensor starts at a multiple of this in a buffer, so that a view of any type is aligned.
_ALIGNMENT = 16


def broadcast_json(obj: Any, group: dist.ProcessGroup | None = None, src: int = 0) -> Any:
    """``obj`` of rank ``src``, on every rank; what the others pass is ignored.

    ``src`` gets its own object back, the others a copy: tuples have become lists, and keys strings.

    Raises:
        TypeError: on ``src``, if ``obj`` is not made of JSON values.
    """
    if group is None:
        return obj
    import torch
    import torch.distributed as dist

    device, root = _device(group), dist.get_global_rank(group, src)
    is_src = dist.get_rank(group) == src
    data = torch.zeros(0, dtype=torch.uint8, device=device)
    if is_src:
        data = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, root, group=group)
    if not is_src:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, root, group=group)
    return obj if is_src else json.loads(data.cpu().numpy().tobytes())


def scatter_batches(
    batches: Sequence[PackedBatch] | None, group: dist.ProcessGroup | None = None, src: int = 0
) -> PackedBatch:
    """Give each rank one batch.

    Args:
        batches: on ``src``: one per rank of the group, in order, any of them empty; elsewhere None.

    Returns:
        This rank's batch. ``src`` keeps its own without a copy.

    Raises:
        ValueError: on ``src``, if there is not one batch per rank.
    """
    import torch.distributed as dist

    size = 1 if group is None else dist.get_world_size(group)
    is_src = group is None or dist.get_rank(group) == src
    if is_src and (batches is None or len(batches) != size):
        raise ValueError(f"need one batch for each of the {size} ranks, got {0 if batches is None else len(batches)}")
    if group is None:
        assert batches is not None
        return batches[0]
    import torch

    device = _device(group)
    if is_src:
        assert batches is not None
        broadcast_json([_header(batch) for batch in batches], group, src)
        buffers = {r: _to_bytes(_tensors(b), device) for r, b in enumerate(batches) if r != src}
        sends = [
            dist.isend(buffer, dist.get_global_rank(group, rank), group=group)
            for rank, buffer in buffers.items()
            if len(buffer)
        ]
        for send in sends:
            if send is not None:
                send.wait()
        return batches[src]

    header = broadcast_json(None, group, src)[dist.get_rank(group)]
    images = header["images"]
    fields = [*header["tokens"], *header["rows"], header["cu_seqlens"], *(f for part in images["parts"] for f in part)]
    buffer = torch.empty(sum(_padded(_num_bytes(f)) for f in fields), dtype=torch.uint8, device=device)
    if len(buffer):
        dist.recv(buffer, dist.get_global_rank(group, src), group=group)
    tensors = _from_bytes(buffer, fields)
    n_tokens, n_rows = len(header["tokens"]), len(header["rows"])
    named = list(zip([field["name"] for field in fields], tensors, strict=True))
    rest = iter(named[n_tokens + n_rows + 1 :])
    parts = [dict(itertools.islice(rest, len(part))) for part in images["parts"]]
    return PackedBatch(
        tensors[n_tokens + n_rows],
        dict(named[:n_tokens]),
        dict(named[n_tokens : n_tokens + n_rows]),
        None if images["of"] is None else [parts[index] for index in images["of"]],
    )


def gather_tensors(
    local: torch.Tensor, group: dist.ProcessGroup | None = None, dst: int = 0
) -> list[torch.Tensor] | None:
    """Every rank's tensor, in order of rank, on ``dst``; None elsewhere. Shapes and types may differ, or be empty."""
    if group is None:
        return [local]
    import torch
    import torch.distributed as dist

    device, rank, size = _device(group), dist.get_rank(group), dist.get_world_size(group)
    local = local.detach().to(device).contiguous()
    if local.ndim > _MAX_DIMS:
        raise ValueError(f"cannot gather a tensor of {local.ndim} dimensions; at most {_MAX_DIMS}")
    shape = [*local.shape, *[0] * (_MAX_DIMS - local.ndim)]
    header = torch.tensor([_DTYPES.index(_dtype_name(local)), local.ndim, *shape], device=device)
    headers = [torch.empty_like(header) for _ in range(size)]
    dist.all_gather(headers, header, group=group)
    if rank != dst:
        if local.numel():
            dist.send(_as_bytes(local), dist.get_global_rank(group, dst), group=group)
        return None
    gathered = []
    for source, row in enumerate(torch.stack(headers).tolist()):
        code, ndim, dims = row[0], row[1], row[2:]
        if source == dst:
            gathered.append(local)
            continue
        tensor = torch.empty(dims[:ndim], dtype=getattr(torch, _DTYPES[code]), device=device)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), dist.get_global_rank(group, source), group=group)
        gathered.append(tensor)
    return gathered


def gather_tokens(
    local: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    parts: Sequence[Sequence[int]] | None,
    group: dist.ProcessGroup | None = None,
    dst: int = 0,
) -> torch.Tensor | None:
    """Undo the scatter of a batch for one per-token tensor.

    Args:
        local: ``[T_rank, ...]``, aligned with this rank's shard.
        cu_seqlens: on ``dst``: int ``[B + 1]`` of the whole batch.
        parts: on ``dst``: the sequences that each rank of the group was given, in the order of its shard.

    Returns:
        On ``dst`` ``[T, ...]``, aligned with the whole batch (0 for sequences in no part); None elsewhere.
    """
    import torch

    gathered = gather_tensors(local, group, dst)
    if gathered is None:
        return None
    if cu_seqlens is None or parts is None:
        raise ValueError("the receiving rank must bring cu_seqlens and parts")
    positions = PackedBatch(cu_seqlens, {"input_ids": torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)})
    mine = gathered[dst]
    result = torch.zeros((positions.num_tokens, *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
    for part, values in zip(parts, gathered, strict=True):
        result[positions.select(part)["input_ids"].to(mine.device)] = values
    return result


def _device(group: dist.ProcessGroup) -> torch.device:
    import torch
    import torch.distributed as dist

    if "gloo" in str(dist.get_backend(group)) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"cannot send tensors of type {name}; known: {', '.join(_DTYPES)}")
    return name


def _tensors(batch: PackedBatch) -> list[torch.Tensor]:
    images = (tensor for part in _image_parts(batch) for tensor in part.values())
    return [*batch.tokens.values(), *batch.rows.values(), batch.cu_seqlens, *images]


def _image_parts(batch: PackedBatch) -> list[Mapping[str, torch.Tensor]]:
    """The mappings of the batch's images, those that several sequences share once."""
    return list({id(part): part for part in batch.multi_modal_input or ()}.values())


def _header(batch: PackedBatch) -> dict[str, Any]:
    def field(name: str, tensor: torch.Tensor) -> dict[str, Any]:
        return {"name": name, "dtype": _dtype_name(tensor), "shape": list(tensor.shape)}

    parts = _image_parts(batch)
    number = {id(part): index for index, part in enumerate(parts)}
    given = batch.multi_modal_input
    return {
        "images": {
            "parts": [[field(name, tensor) for name, tensor in part.items()] for part in parts],
            "of": None if given is None else [number[id(part)] for part in given],
        },
        "tokens": [field(name, tensor) for name, tensor in batch.tokens.items()],
        "rows": [field(name, tensor) for name, tensor in batch.rows.items()],
        "cu_seqlens": field("cu_seqlens", batch.cu_seqlens),
    }


def _num_bytes(field: dict[str, Any]) -> int:
    import torch

    return math.prod(field["shape"]) * getattr(torch, _DTYPES[_DTYPES.index(field["dtype"])]).itemsize


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _to_bytes(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    import torch

    pieces = [_as_bytes(tensor.detach().to(device).contiguous()) for tensor in tensors]
    buffer = torch.zeros(sum(_padded(len(piece)) for piece in pieces), dtype=torch.uint8, device=device)
    start = 0
    for piece in pieces:
        buffer[start : start + len(piece)] = piece
        start += _padded(len(piece))
    return buffer


def _from_bytes(buffer: torch.Tensor, fields: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    import torch

    tensors, start = [], 0
    for field in fields:
        size = _num_bytes(field)
        piece = buffer[start : start + size].view(getattr(torch, field["dtype"])).reshape(field["shape"])
        # A copy: the views would keep the whole buffer alive and share its storage.
        tensors.append(piece.clone())
        start += _padded(size)
    return tensors
