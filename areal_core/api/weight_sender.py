"""The train engine's end of ``weight_update.type: distributed``: rank 0 of a group with the inference engine's workers.

The group has nothing to do with torch.distributed's default one. Over gloo it is a ``ProcessGroupGloo``; over NCCL a
communicator from a unique id, which needs no rendezvous that both sides would have to share code for.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import attrs

from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger

if TYPE_CHECKING:
    import torch

    from areal_core.api.engine_api import InferenceEngine
    from areal_core.api.io_struct import WeightUpdateMeta

logger = getLogger("WeightSender")

#: (name in Hugging Face layout, shape, dtype).
Specs = list[tuple[str, list[int], str]]
_JOIN_SECONDS, _POLL = 120.0, timedelta(milliseconds=200)


class _Link(Protocol):
    def broadcast(self, data: torch.Tensor, check: Callable[[], None]) -> None:
        """Send bytes as rank 0. ``check`` raises when it is no use to wait on."""

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until everything has left."""

    def close(self) -> None: ...


class WeightSender:
    """Sends the weights of a train engine to an inference engine. Lives on the train engine's rank 0.

    Args:
        engine: receives; its workers join when the first weights are sent, and anew whenever they are others.
        device: of the train engine. On a CPU the group is gloo, on CUDA it is NCCL.
    """

    def __init__(self, engine: InferenceEngine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self._link: _Link | None = None
        self._receivers: tuple[str, ...] = ()

    def send(self, meta: WeightUpdateMeta, specs: Specs, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send every tensor of ``specs``, in buckets of ``meta.chunk_mb``; returns when the receivers use them.

        Args:
            tensors: what ``specs`` describes, in that order. It is read one tensor at a time, so that no more than a
                bucket and a tensor need to exist.

        Raises:
            ArealError: if a receiver refuses or is lost. Before the first bucket the old weights stay.
            ValueError: if the tensors are others than ``specs`` says.
        """
        link = self._connect(meta)
        ready = threading.Event()
        done = _in_thread(lambda: self.engine.update_weights_from_distributed(meta, specs, ready.set))
        done.add_done_callback(lambda _: ready.set())
        ready.wait()
        try:
            if not done.done():

                def check() -> None:
                    if done.done() and done.exception() is not None:
                        done.result()

                for bucket in _buckets(specs, tensors, meta.chunk_mb << 20, self.device):
                    link.broadcast(bucket, check)
                link.finish(check)
            done.result()
        except BaseException:
            # Nobody knows how far the others came.
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        link, self._link, self._receivers = self._link, None, ()
        if link is not None:
            link.close()

    def _connect(self, meta: WeightUpdateMeta) -> _Link:
        receivers = self.engine.weight_receivers()
        if not receivers:
            raise BadInputError(
                f"weight_update.type: {type(self.engine).__name__} takes no weights over a process group. Use 'disk'."
            )
        if self._link is not None and receivers == self._receivers:
            return self._link
        self.close()
        open_link = _open_nccl if self.device.type == "cuda" else _open_gloo
        self._link = open_link(self.engine, meta, len(receivers) + 1, self.device)
        self._receivers = receivers
        logger.debug("joined %d receivers of weights", len(receivers))
        return self._link


def _buckets(
    specs: Specs, tensors: Iterator[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Bytes of the tensors, one behind the other; a bucket ends with the tensor that brings it beyond ``limit``."""
    import torch

    parts: list[torch.Tensor] = []
    size = 0
    count = 0
    for name, tensor in tensors:
        found = (name, list(tensor.shape), dtype_name(tensor))
        if count == len(specs) or found != tuple(specs[count]):
            expected = "nothing more" if count == len(specs) else f"{specs[count]}"
            raise ValueError(f"the weights are not what was announced: {found} instead of {expected}")
        count += 1
        data = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
        parts.append(data)
        size += data.numel()
        if size > limit:
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
            parts, size = [], 0
    if count != len(specs):
        raise ValueError(f"the weights are not what was announced: {specs[count][0]!r} is missing")
    if parts:
        yield torch.cat(parts)


def dtype_name(tensor: torch.Tensor) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def _in_thread(call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Run in a daemon thread: one that hangs in a group that broke must not hold up the end of the process."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="areal-weight-sender").start()
    return future


def _join(engine: InferenceEngine, meta: WeightUpdateMeta, options: dict[str, Any], enter: Callable[[], Any]) -> Any:
    """``enter`` the group as rank 0 while the receivers join; whichever fails first says why."""
    meta = attrs.evolve(meta, options={**meta.options, **options})
    theirs, ours = _in_thread(lambda: engine.init_weights_update_group(meta)), _in_thread(enter)
    finished, _ = concurrent.futures.wait(
        (theirs, ours), timeout=_JOIN_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
    )
    for future in (theirs, ours):
        if future in finished:
            future.result()
    if len(finished) < 2:
        raise ArealError(f"weight_update: the receivers of weights did not join within {_JOIN_SECONDS:g} s.")
    return ours.result()


# ---------------------------------------------------------------------------------------------------------- gloo


@attrs.define
class _GlooLink:
    group: Any
    # Keeps the rendezvous alive that receivers may still read from.
    store: Any

    def broadcast(self, data: torch.Tensor, check: Callable[[], None]) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self.group.broadcast([data], options)
        while not work.is_completed():
            check()
            # Waiting with a bound raises at it, and may be done again.
            with contextlib.suppress(RuntimeError):
                work.wait(_POLL)
        work.wait()

    def finish(self, check: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        # Ends what still waits in it; the destructor alone would wait for that.
        with contextlib.suppress(Exception):
            self.group.abort()


def _open_gloo(engine: InferenceEngine, meta: WeightUpdateMeta, world_size: int, device: torch.device) -> _Link:
    import torch.distributed as dist

    if not dist.is_gloo_available():
        raise BadInputError(
            "weight_update.type: 'distributed' needs gloo on a CPU, and this torch has none. Use 'disk'."
        )
    timeout = timedelta(seconds=_JOIN_SECONDS)
    address = _own_address(engine.weight_receivers())
    # A socket of our own: the store's would listen on all interfaces, not on the one towards the receivers alone.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    store = dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    prefix = f"areal-weights-{uuid4().hex}"
    options = {
        "backend": "gloo",
        "master_address": address,
        "master_port": store.port,
        "world_size": world_size,
        "prefix": prefix,
        "timeout": _JOIN_SECONDS,
    }

    def enter() -> Any:
        settings = dist.ProcessGroupGloo._Options()
        # Not what the host name happens to resolve to.
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        settings._timeout = timeout
        return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), 0, world_size, settings)

    return _GlooLink(_join(engine, meta, options, enter), store)


def _own_address(receivers: Sequence[str]) -> str:
    """The address at which the host of ``host:port...``, or of a URL, reaches this machine."""
    name = receivers[0]
    host = (urlsplit(name if "://" in name else f"//{name}").hostname if ":" in name else None) or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the interface.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


# ---------------------------------------------------------------------------------------------------------- NCCL


@attrs.define
class _NcclLink:
    communicator: Any
    device: Any
    #: Sent, but perhaps not read yet by the copy engine.
    pending: list[Any] = attrs.field(factory=list)

    def broadcast(self, data: torch.Tensor, check: Callable[[], None]) -> None:
        import torch

        check()
        with torch.cuda.device(self.device):
            torch.cuda.nccl.broadcast([data], 0, comms=[self.communicator])
            event = torch.cuda.Event()
            event.record()
        self.pending.append((event, data))
        # No more than two buckets in memory.
        while len(self.pending) > 1:
            self._wait_first(check)

    def finish(self, check: Callable[[], None]) -> None:
        while self.pending:
            self._wait_first(check)

    def _wait_first(self, check: Callable[[], None]) -> None:
        import time

        event, _ = self.pending[0]
        while not event.query():
            check()
            time.sleep(0.0005)
        self.pending.pop(0)

    def close(self) -> None:
        # torch destroys a communicator with its last reference.
        self.communicator = None
        self.pending.clear()


def _open_nccl(engine: InferenceEngine, meta: WeightUpdateMeta, world_size: int, device: torch.device) -> _Link:
    import torch
    from torch.cuda import nccl

    unique_id = nccl.unique_id()
    options = {
        "backend": "nccl",
        "world_size": world_size,
        "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
    }

    def enter() -> Any:
        with torch.cuda.device(device):
            communicator = nccl.init_rank(world_size, unique_id, 0)
            # vLLM's workers begin with this on a communicator from a unique id.
            warm_up = torch.zeros(1, device=device)
            nccl.all_reduce([warm_up], comms=[communicator])
            torch.cuda.synchronize(device)
        return communicator

    return _NcclLink(_join(engine, meta, options, enter), device)
