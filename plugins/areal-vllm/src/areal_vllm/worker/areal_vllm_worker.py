"""What AReaL adds to the workers of a vLLM server: weights over gloo, and reloading that checks before it starts.

Loaded by vLLM itself (``--worker-extension-cls areal_vllm_worker.WorkerExtension``), perhaps in an environment without
AReaL: it imports only torch and vLLM. Its folder holds nothing else and is on the server's ``PYTHONPATH``.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import areal_vllm_generators
import areal_vllm_logprobs
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
        settings = dist.ProcessGroupGloo._Options()
        address = _address_towards(init_info.master_address)
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        settings._timeout = timeout
        self.group = dist.ProcessGroupGloo(prefixed, rank, init_info.world_size, settings)
        self.bucket_bytes = init_info.packed_buffer_size_bytes

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        failure: Exception | None = None
        for bucket in _buckets(update_info, self.bucket_bytes):
            try:
                packed = self._receive(sum(n_bytes for *_, n_bytes in bucket))
            except Exception:
                _restore(self.model)
                raise
            if failure is not None:
                # The sender and the other workers go on: stay in step with them.
                continue
            try:
                self.model.load_weights(_unpack(packed, bucket))
            except Exception as error:
                failure = error
        if failure is not None:
            _restore(self.model)
            raise failure

    def _receive(self, n_bytes: int) -> torch.Tensor:
        # A new buffer each time: vLLM keeps views of it until all weights of their layer have come.
        packed = torch.empty(n_bytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([packed], options).wait()
        return packed

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _pack_heads(self.model)

    def shutdown(self) -> None:
        self.group = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Pack the heads' weights again for a CPU: a head that is tied to the embeddings keeps a copy of the old ones.

    Reloading packs only what it has loaded, and tied weights are loaded as the embeddings.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _restore(model: torch.nn.Module) -> None:
    """Give layers that have not got all of their new weights the old ones back."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


#: Name, dtype, shape and bytes of each tensor in it.
_Bucket = list[tuple[str, torch.dtype, list[int], int]]


def _buckets(info: GlooUpdateInfo, limit: int) -> Iterator[_Bucket]:
    bucket: _Bucket = []
    size = 0
    for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        bucket.append((name, dtype, shape, torch.Size(shape).numel() * dtype.itemsize))
        size += bucket[-1][-1]
        if size > limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _unpack(packed: torch.Tensor, bucket: _Bucket) -> list[tuple[str, torch.Tensor]]:
    parts = packed.split([n_bytes for *_, n_bytes in bucket])
    return [
        (name, _typed(part, dtype).view(shape)) for (name, dtype, shape, _), part in zip(bucket, parts, strict=True)
    ]


def _address_towards(host: str) -> str:
    """This machine's address on the way to ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the interface.
        probe.connect((host, 9))
        return probe.getsockname()[0]


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

    def areal_reload(self, path: str) -> dict[str, Any]:
        """Load the safetensors in the folder, in place."""
        self.reload_weights(weights_path=path)
        _pack_heads(self.model_runner.get_model())
        return {"path": path}

    def areal_adapters(self) -> dict[str, Any]:
        """Numbers of the adapters that are loaded."""
        has_any = self.vllm_config.lora_config is not None
        return {"numbers": sorted(self.list_loras()) if has_any else []}

    def areal_swap_adapter(self, name: str, number: int, path: str) -> dict[str, Any]:
        """Replace a loaded adapter, for requests that run too. One that cannot be loaded leaves the old one."""
        from vllm.lora.request import LoRARequest

        # Not through the server's own load_inplace: its requests would then load the adapter again at every step.
        self.add_lora(LoRARequest(name, number, path, load_inplace=True))
        return {"numbers": sorted(self.list_loras())}


# vLLM imports this module before it makes the sampler.
areal_vllm_logprobs.install()
areal_vllm_generators.install()
