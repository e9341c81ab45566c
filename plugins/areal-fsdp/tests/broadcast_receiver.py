"""An inference engine's end of ``weight_update.type: distributed``: threads that join the group and keep what comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from areal_core.api.io_struct import WeightUpdateMeta

Specs = list[tuple[str, list[int], str]]


class BroadcastReceiver:
    """``workers`` ranks that receive.

    Args:
        refuse: raised before anything is received.
        break_after: the number of buckets after which the workers leave the group.
    """

    def __init__(self, workers: int = 1, refuse: Exception | None = None, break_after: int | None = None) -> None:
        self.workers, self.refuse, self.break_after = workers, refuse, break_after
        self.names = tuple(f"127.0.0.1:1/{worker}" for worker in range(workers))
        self.groups: list[Any] = []
        self.joined = 0
        self.specs: Specs = []
        #: Of each worker: what it got, and the sizes of the buckets that it came in.
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.buckets: list[list[int]] = []

    def weight_receivers(self) -> tuple[str, ...]:
        return self.names

    def init_weights_update_group(self, meta: WeightUpdateMeta) -> None:
        options = meta.options
        self.joined += 1
        self.groups = [None] * self.workers

        def join(worker: int) -> None:
            timeout = timedelta(seconds=60)
            store = dist.TCPStore(options["master_address"], options["master_port"], is_master=False, timeout=timeout)
            settings = dist.ProcessGroupGloo._Options()
            settings._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            settings._timeout = timeout
            self.groups[worker] = dist.ProcessGroupGloo(
                dist.PrefixStore(options["prefix"], store), worker + 1, options["world_size"], settings
            )

        self._everywhere(join)

    def update_weights_from_distributed(
        self, meta: WeightUpdateMeta, specs: Specs, on_ready: Callable[[], None] | None = None
    ) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.specs = specs
        self.tensors = [{} for _ in range(self.workers)]
        self.buckets = [[] for _ in range(self.workers)]
        if on_ready is not None:
            on_ready()
        self._everywhere(lambda worker: self._receive(worker, meta.chunk_mb << 20))
        if self.break_after is not None:
            raise RuntimeError("the worker is gone")

    def _receive(self, worker: int, limit: int) -> None:
        bucket: list[tuple[str, list[int], torch.dtype, int]] = []
        size = 0
        for index, (name, shape, dtype_name) in enumerate(self.specs):
            dtype = getattr(torch, dtype_name)
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            bucket.append((name, shape, dtype, n_bytes))
            size += n_bytes
            if size <= limit and index < len(self.specs) - 1:
                continue
            if self.break_after is not None and len(self.buckets[worker]) == self.break_after:
                self.groups[worker] = None
                return
            data = torch.empty(size, dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self.groups[worker].broadcast([data], options).wait()
            self.buckets[worker].append(size)
            for (key, dims, kind, _), part in zip(bucket, data.split([n for *_, n in bucket]), strict=True):
                self.tensors[worker][key] = part.clone().view(kind).view(dims)
            bucket, size = [], 0

    def _everywhere(self, call: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=call, args=(worker,)) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
