"""The whole training state in torch.distributed.checkpoint: tensors only, so that nothing of ours is pickled."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from areal_core.errors import BadInputError
from areal_fsdp.background import BackgroundSave, cause, save_error
from areal_fsdp.dcp_reader import SafeReader, tensors_of
from areal_fsdp.optim import ensure_state
from areal_fsdp.save_process import ProcessWriter, SaveProcess

META_FILE = "areal_state.json"
_NO_GROUP = "torch.distributed is disabled"


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """``model.NAME`` and ``optim.NAME.KEY``: the live tensors, perhaps sharded; tied parameters once."""
    tensors: dict[str, torch.Tensor] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, value in model.named_parameters():
        tensors[f"model.{name}"] = value.detach()
    for name, value in model.named_buffers():
        if name in persistent:
            tensors[f"model.{name}"] = value
    if optimizer is None:
        return tensors
    ensure_state(optimizer)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def rng_tensors(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this rank's random generators."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    if kind != "MT19937":
        raise RuntimeError(f"numpy's global generator is {kind}, not MT19937")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{name}": value for name, value in tensors.items()}


def set_rng(tensors: dict[str, torch.Tensor], rank: int, device: torch.device) -> None:
    state = {name.split(".", 2)[2]: value for name, value in tensors.items() if name.startswith(f"rng.{rank}.")}
    torch.set_rng_state(state["torch"])
    version, *internal = state["python"].tolist()
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss if has_gauss else None))
    position, numpy_has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, numpy_has_gauss, state["numpy_gauss"].item()))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def _single_process_expected() -> Iterator[None]:
    """torch warns of a missing process group even where ``no_dist`` says that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP, category=UserWarning)
        yield


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    meta: dict[str, Any],
    rank: int,
    device: torch.device,
    background: dist.ProcessGroup | bool = False,
    process: SaveProcess | None = None,
) -> BackgroundSave | None:
    """Write model, optimizer, generators and ``meta`` (JSON). Every rank calls it.

    Args:
        background: copy the state to host memory, and return while ``process`` writes it: True in a single process,
            else a gloo group that nothing else uses meanwhile.

    Raises:
        ArealError: on every rank, if a file cannot be written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    state: dict[str, Any] = training_tensors(model, optimizer)
    state.update(rng_tensors(rank, device))
    no_dist = not dist.is_initialized()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # As text: torch would pickle a path object into the metadata.
        writer = dcp.FileSystemWriter(str(path)) if process is None else ProcessWriter(str(path), process)
        if rank == 0:
            text = json.dumps({**meta, "world_size": _world_size()}, indent=2)
            (path / META_FILE).write_text(text + "\n", encoding="utf-8")
        if background:
            # Its thread outlives any context here.
            warnings.filterwarnings("ignore", message=_NO_GROUP, category=UserWarning)
            group: Any = None if no_dist else background
            future: Any = dcp.async_save(state, storage_writer=writer, process_group=group, no_dist=no_dist)
            return BackgroundSave(future, path)
        with _single_process_expected():
            dcp.save(state, storage_writer=writer, no_dist=no_dist)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise save_error(path, error) from error
    return None


def load_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    rank: int,
    device: torch.device,
) -> dict[str, Any]:
    """Read what ``save_state`` wrote, also from another number of ranks; returns ``meta``.

    The generators are set only if the number of ranks is the same: each rank has its own.

    Raises:
        BadInputError: if something is missing, unreadable or of another shape; nothing has changed then.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    meta = read_meta(path)
    reader = SafeReader(str(path))
    stored = tensors_of(reader.read_metadata())
    live = training_tensors(model, optimizer)
    same_world = meta.get("world_size") == _world_size()
    for name, value in live.items():
        if name not in stored:
            hint = " It was saved without optimizer state." if name.startswith("optim.") else ""
            raise BadInputError(f"{path}: tensor {name!r} is missing.{hint}")
        if tuple(stored[name].size) != tuple(value.shape):
            raise BadInputError(
                f"{path}: tensor {name!r} has shape {tuple(stored[name].size)}, the model needs {tuple(value.shape)}."
            )
    # Into new tensors first: a file that turns out to be broken must not leave a half-loaded model.
    fresh: dict[str, Any] = {name: torch.empty_like(value) for name, value in live.items()}
    if same_world:
        fresh.update({k: torch.empty_like(v) for k, v in rng_tensors(rank, device).items() if k in stored})
    try:
        with _single_process_expected():
            dcp.load(fresh, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise BadInputError(f"{path}: cannot read the checkpoint ({cause(error)}).") from error
    with torch.no_grad():
        for name, value in live.items():
            value.copy_(fresh[name])
    if same_world:
        set_rng(fresh, rank, device)
    return meta


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON beside the tensors.

    Raises:
        BadInputError: if it is missing or damaged.
    """
    try:
        meta = json.loads((path / META_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(f"{path}: no {META_FILE}; this is not a checkpoint of the fsdp engine.") from error
    except ValueError as error:
        raise BadInputError(f"{path / META_FILE}: not valid JSON ({error}).") from error
    for key in ("version", "steps", "schedule_step"):
        if not isinstance(meta, dict) or not isinstance(meta.get(key), int):
            raise BadInputError(f"{path / META_FILE}: has no whole number {key!r}.")
    return meta


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
