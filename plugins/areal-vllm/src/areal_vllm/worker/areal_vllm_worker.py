"""What AReaL adds to the workers of a vLLM server: weights over gloo, and reloading that checks before it starts.

Loaded by vLLM itself (``--worker-extension-cls areal_vllm_worker.WorkerExtension``), perhaps in an environment without
AReaL: it imports only torch and vLLM. Its folder holds nothing else and is on the server's ``PYTHONPATH``.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the sender (rank 0) waits, and which ranks this server's workers take from ``rank_offset`` on."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    #: A bucket is closed by the tensor that brings it beyond this.
    packed_buffer_size_bytes: int
    timeout: float
    prefix: str


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What comes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives full tensors, in buckets of bytes, by broadcast over a gloo group of its own."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: Any = None
    bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group; a former one is left."""
        self.shutdown()
        timeout = datetime.timedelta(seconds=init_info.timeout)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=timeout)
        rank = init_info.rank_offset + self.parallel_config.rank
        prefixed = dist.PrefixStore(init_info.prefix, store)
        self.group = dist.ProcessGroupGloo(prefixed, rank, init_info.world_size, timeout)
        self.bucket_bytes = init_info.packed_buffer_size_bytes

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        bucket: list[tuple[str, torch.dtype, list[int], int]] = []
        size = 0
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            bucket.append((name, dtype, shape, n_bytes))
            size += n_bytes
            if size > self.bucket_bytes:
                self._receive_bucket(bucket, size)
                bucket, size = [], 0
        if bucket:
            self._receive_bucket(bucket, size)

    def _receive_bucket(self, bucket: list[tuple[str, torch.dtype, list[int], int]], size: int) -> None:
        # A new buffer each time: vLLM keeps views of it until all weights of their layer have come.
        packed = torch.empty(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([packed], options).wait()
        parts = packed.split([n_bytes for *_, n_bytes in bucket])
        self.model.load_weights(
            [
                (name, _typed(part, dtype).view(shape))
                for (name, dtype, shape, _), part in zip(bucket, parts, strict=True)
            ]
        )

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers; copied where they do not lie at a multiple of a number's size."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class WorkerExtension:
    """Methods that ``/collective_rpc`` can call on every worker."""

    def areal_find_weights(self, path: str) -> dict[str, Any]:
        """Whether this worker sees the safetensors in the folder: their names and sizes."""
        try:
            with os.scandir(path) as entries:
                files = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".safetensors")}
        except OSError as error:
            return {"error": error.strerror or repr(error), "files": {}}
        return {"error": None, "files": files}
