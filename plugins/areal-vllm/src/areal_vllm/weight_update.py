"""New weights into running servers: from disk, over a process group, or as an adapter.

All of it happens while the servers are paused. What can be checked is checked before a server touches its weights, so
that an update that cannot work leaves the old version in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_vllm.client import RequestRefused, ServerError
from areal_vllm.weight_files import Shapes, check_same, folder_shapes, ties_embeddings

if TYPE_CHECKING:
    from areal_vllm.engine import VLLMEngine
    from areal_vllm.routing import Replica

logger = getLogger("VLLMWeights")

#: The name that the trained adapter has in the servers.
ADAPTER_NAME = "areal-actor"
_ADAPTER_FILES = "adapter_model*.safetensors"


def update_from_disk(engine: VLLMEngine, meta: WeightUpdateMeta) -> None:
    """Reload all servers from ``meta.path``, in place: a whole model, or (``lora``) an adapter.

    Raises:
        BadInputError: if the folder does not hold the weights of the servers' model; they keep what they have.
        ArealError: if a server failed.
    """
    if meta.path is None:
        raise BadInputError(f"weight update: type {meta.type!r} needs a path.")
    load = _load_adapter if meta.type == "lora" else _load_weights
    load(engine, meta.path.absolute(), engine.fleet.live)
    _finish(engine, meta, ADAPTER_NAME if meta.type == "lora" else None)


def _finish(engine: VLLMEngine, meta: WeightUpdateMeta, request_model: str | None) -> None:
    fleet = engine.fleet
    if engine.config.weight_update_keep_kv and engine.capabilities.reset_prefix_cache:
        # Running requests keep what they have computed; new ones must not build on it.
        fleet.post_all("/reset_prefix_cache")
    engine.request_model = request_model
    engine.weights_updated(meta.version)
    engine.last_update = meta


def bring_up_to_date(engine: VLLMEngine, replica: Replica) -> bool:
    """Give a server that came back the current weights, if they lie in a folder."""
    meta = engine.last_update
    if meta is None or meta.path is None or meta.type not in ("disk", "lora"):
        return False
    load = _load_adapter if meta.type == "lora" else _load_weights
    try:
        load(engine, meta.path.absolute(), [replica])
    except ArealError as error:
        logger.warning("%s stays without the current weights: %s", replica.address, error)
        return False
    return True


# -------------------------------------------------------------------------------------------------- whole models


def _load_weights(engine: VLLMEngine, folder: Path, replicas: Sequence[Replica]) -> None:
    _need(engine, "collective_rpc", "disk")
    shapes = folder_shapes(folder)
    _check_shapes(engine, shapes)
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    _check_seen(engine, folder, files, replicas)
    for has_extension in (True, False):
        chosen = [replica for replica in replicas if _has_extension(engine, replica) is has_extension]
        if chosen and has_extension:
            _rpc(engine, "areal_reload", {"path": str(folder)}, chosen)
        elif chosen:
            _rpc(engine, "reload_weights", {"weights_path": str(folder)}, chosen)


def _check_shapes(engine: VLLMEngine, shapes: Shapes) -> None:
    """Against the folder that the servers' model came from, if that is here and holds weights."""
    source = Path(engine.model_path)
    if not any(source.glob("*.safetensors")):
        return
    check_same(shapes, folder_shapes(source), tied=ties_embeddings(source))


def _check_seen(engine: VLLMEngine, folder: Path, files: dict[str, int], replicas: Sequence[Replica]) -> None:
    """Whether the servers see the same files: one that does not would end, and not only refuse.

    Raises:
        BadInputError: naming the server.
    """
    asked = [replica for replica in replicas if _has_extension(engine, replica)]
    if not asked:
        return
    for replica, workers in zip(asked, _rpc(engine, "areal_find_weights", {"path": str(folder)}, asked), strict=True):
        for found in workers:
            if found["error"] is not None or {name: found["files"].get(name) for name in files} != files:
                seen = found["error"] or "other files are there"
                raise BadInputError(
                    f"weight update: the server {replica.address} does not see {folder} as the trainer does ({seen}). "
                    "Put the run (run.root) on a file system that both have, or use weight_update.type=distributed. "
                    "The servers keep the weights that they have."
                )


# -------------------------------------------------------------------------------------------------- adapters


def _load_adapter(engine: VLLMEngine, folder: Path, replicas: Sequence[Replica]) -> None:
    _need(engine, "lora_loading", "lora")
    shapes = folder_shapes(folder, _ADAPTER_FILES)
    if not (folder / "adapter_config.json").is_file():
        raise BadInputError(f"weight update: {folder} is no adapter: it has no adapter_config.json.")
    files = {file.name: file.stat().st_size for file in folder.glob(_ADAPTER_FILES)}
    _check_seen(engine, folder, files, replicas)
    for replica in replicas:
        before = replica.data.get("adapter_shapes")
        if before is not None:
            check_same(shapes, before, tied=False)
    new = [replica for replica in replicas if "adapter_id" not in replica.data]
    if new:
        _register_adapter(engine, folder, new)
    old = [replica for replica in replicas if replica not in new]
    swapped = [replica for replica in old if replica.data["adapter_id"] is not None]
    if swapped:
        engine.fleet.post_all(
            "/collective_rpc",
            json=lambda index, replica: {
                "method": "areal_swap_adapter",
                "kwargs": {"name": ADAPTER_NAME, "number": replica.data["adapter_id"], "path": str(folder)},
            },
            timeout=engine.options.update_timeout,
            replicas=swapped,
        )
    plain = [replica for replica in old if replica not in swapped]
    if plain:
        # vLLM then reads the adapter again with every step, which is slow and harmless: it changes only in a pause.
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(folder), "load_inplace": True}
        engine.fleet.post_all("/v1/load_lora_adapter", json=body, timeout=engine.options.update_timeout, replicas=plain)
    for replica in replicas:
        replica.data["adapter_shapes"] = shapes


def _register_adapter(engine: VLLMEngine, folder: Path, replicas: Sequence[Replica]) -> None:
    """Load it under its name for the first time, and find out which number the workers know it by."""
    for replica in replicas:
        extended = _has_extension(engine, replica)
        before = _adapter_numbers(engine, replica) if extended else set()
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(folder)}
        timeout = engine.options.update_timeout
        try:
            engine.fleet.post_all("/v1/load_lora_adapter", json=body, timeout=timeout, replicas=[replica])
        except RequestRefused as error:
            if "already" not in str(error):
                raise
            # Another run's: requests of ours must not get it.
            engine.fleet.post_all("/v1/unload_lora_adapter", json={"lora_name": ADAPTER_NAME}, replicas=[replica])
            before = _adapter_numbers(engine, replica) if extended else set()
            engine.fleet.post_all("/v1/load_lora_adapter", json=body, timeout=timeout, replicas=[replica])
        new = _adapter_numbers(engine, replica) - before if extended else set()
        replica.data["adapter_id"] = new.pop() if len(new) == 1 else None


def _adapter_numbers(engine: VLLMEngine, replica: Replica) -> set[int]:
    (workers,) = _rpc(engine, "areal_adapters", {}, [replica])
    return set(workers[0]["numbers"])


# -------------------------------------------------------------------------------------------------- process groups


def receivers(engine: VLLMEngine) -> tuple[str, ...]:
    """``address/worker`` of every worker of every live server; empty if one of them offers no transfer."""
    names: list[str] = []
    replicas = engine.fleet.live
    if not all(replica.capabilities is not None and replica.capabilities.native_transfer for replica in replicas):
        return ()
    unknown = [replica for replica in replicas if "world_size" not in replica.data]
    if unknown:
        for replica, answer in zip(unknown, engine.fleet.get_all("/get_world_size", replicas=unknown), strict=True):
            if answer is not None:
                replica.data["world_size"] = int(answer["world_size"])
    for replica in replicas:
        names += [f"{replica.address}/{worker}" for worker in range(replica.data.get("world_size", 0))]
    return tuple(names)


def init_group(engine: VLLMEngine, meta: WeightUpdateMeta) -> None:
    """Let all workers of all live servers join, as ranks 1 and up. Blocks until the trainer has joined too.

    Raises:
        ArealError: with what a server answered.
    """
    options = dict(meta.options)
    backend = options.pop("backend")
    options["packed_buffer_size_bytes"] = meta.chunk_mb << 20
    if backend == "nccl":
        options.update(packed=True)
    offsets, rank = {}, 1
    for replica in engine.fleet.live:
        offsets[replica.address] = rank
        rank += replica.data.get("world_size", 0)
    try:
        engine.fleet.post_all(
            "/init_weight_transfer_engine",
            json=lambda index, replica: {"init_info": {**options, "rank_offset": offsets[replica.address]}},
        )
    except (RequestRefused, ServerError) as error:
        raise ArealError(
            f"weight update: a server did not join the group for weights: {error}\nThe trainer sends by {backend}. "
            f'Servers that a run starts have --weight-transfer-config {{"backend": "{backend}"}}; start others so too.'
        ) from error


def update_from_distributed(
    engine: VLLMEngine,
    meta: WeightUpdateMeta,
    specs: Sequence[tuple[str, list[int], str]],
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Receive ``specs`` in all live servers.

    Raises:
        BadInputError: if they are not the servers' model's; nothing was touched.
        ArealError: if a server failed. In the middle of the transfer that leaves it with parts of both versions.
    """
    _check_shapes(engine, {name: tuple(shape) for name, shape, _ in specs})
    fleet = engine.fleet
    try:
        fleet.post_all("/start_weight_update")
    except ArealError:
        # Those that did start take up their old weights again.
        for replica in fleet.live:
            with contextlib.suppress(ArealError):
                fleet.post_all("/finish_weight_update", replicas=[replica])
        raise
    info = {
        "names": [name for name, _, _ in specs],
        "dtype_names": [dtype for _, _, dtype in specs],
        "shapes": [shape for _, shape, _ in specs],
    }
    replicas = fleet.live
    done = fleet.start_all(
        "/update_weights", json={"update_info": info}, timeout=engine.options.update_timeout, replicas=replicas
    )
    if on_ready is not None:
        on_ready()
    try:
        answers = done.result()
    except ArealError as error:
        raise ArealError(f"{error}\n{_TORN}") from error
    lost = [replica.address for replica, answer in zip(replicas, answers, strict=True) if answer is None]
    if lost:
        raise ArealError(f"weight update: {', '.join(lost)} was lost while weights were sent.\n{_TORN}")
    fleet.post_all("/finish_weight_update", timeout=engine.options.update_timeout)
    _finish(engine, meta, None)


_TORN = (
    "The transfer broke in the middle: servers may hold parts of both versions until an update succeeds, so they stay "
    "paused. Restart servers that the run has not started itself before another run uses them."
)


# -------------------------------------------------------------------------------------------------- calls


def _need(engine: VLLMEngine, capability: str, kind: str) -> None:
    for replica in engine.fleet.live:
        if replica.capabilities is not None and not getattr(replica.capabilities, capability):
            raise BadInputError(
                f"weight_update.type: the server {replica.address} cannot do {kind!r}: it is without "
                f"{replica.capabilities.missing[capability]}."
            )


def _has_extension(engine: VLLMEngine, replica: Replica) -> bool:
    """Whether the server's workers have our methods (``areal_vllm_worker``)."""
    known: bool | None = replica.data.get("extension")
    if known is None:
        try:
            _rpc(engine, "areal_adapters", {}, [replica])
            known = True
        except (RequestRefused, ServerError):
            logger.info(
                "%s runs without the worker extension areal_vllm_worker: it cannot check weights before it loads them",
                replica.address,
            )
            known = False
        replica.data["extension"] = known
    return known


def _rpc(engine: VLLMEngine, method: str, kwargs: dict[str, Any], replicas: Sequence[Replica]) -> list[list[Any]]:
    """What each worker of each server returned."""
    answers = engine.fleet.post_all(
        "/collective_rpc",
        json={"method": method, "kwargs": kwargs},
        timeout=engine.options.update_timeout,
        replicas=replicas,
    )
    return [[] if answer is None else answer.get("results", []) for answer in answers]
