"""What an engine saves and loads: Hugging Face folders, whole training states, adapters. Every rank calls these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from areal_core.api.io_struct import SaveLoadMeta
from areal_core.errors import ArealError, BadInputError
from areal_fsdp import checkpoint, comm, export, hf_folder, loading, lora
from areal_fsdp.assembly import whole_model
from areal_fsdp.background import save_error
from areal_fsdp.save_process import shared_save_process

if TYPE_CHECKING:
    from areal_fsdp.engine import FSDPEngine


def save(engine: FSDPEngine, meta: SaveLoadMeta) -> None:
    """``TrainEngine.save``."""
    scorer = engine.built()
    _check_not_quantized(engine)
    finish_saving(engine)
    if meta.weight_format == "hf":
        save_hf(engine, meta.path, tokenizer=meta.tokenizer)
        return
    _check_save_path(engine, meta.path)
    state = {
        "version": engine.version,
        "steps": engine.steps,
        "schedule_step": engine.schedule.step_index if engine.schedule is not None else 0,
    }
    background = meta.background and (engine.mesh.world is None or _background_group(engine))
    if background and engine.save_process is None:
        engine.save_process = shared_save_process()
    error: Exception | None = None
    try:
        engine.background_save = checkpoint.save_state(
            meta.path,
            scorer.model,
            engine.optimizer if meta.with_optim else None,
            meta=state,
            rank=engine.mesh.rank,
            device=engine.device,
            background=background,
            process=engine.save_process if background else None,
        )
    except Exception as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)


def finish_saving(engine: FSDPEngine) -> None:
    """``TrainEngine.finish_saving``."""
    running, engine.background_save = engine.background_save, None
    if running is None:
        return
    error: Exception | None = None
    try:
        running.wait()
    except Exception as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)


def _background_group(engine: FSDPEngine) -> dist.ProcessGroup:
    """A gloo group of its own: the thread's collectives must not meet those of training."""
    if engine.background_group is None:
        engine.background_group = dist.new_group(backend="gloo")
    return engine.background_group


def load(engine: FSDPEngine, meta: SaveLoadMeta) -> None:
    """``TrainEngine.load``."""
    scorer = engine.ready()
    _check_not_quantized(engine)
    error: Exception | None = None
    state: dict[str, Any] = {}
    new: nn.Module | None = None
    try:
        if meta.weight_format == "hf":
            # Rank 0 alone reads; the others know the shapes.
            folder = loading.resolve_folder(str(meta.path))
            is_first = engine.mesh.rank == 0
            new = whole_model(engine.config, engine.mesh, folder, engine.role, from_scratch=False, meta=not is_first)
            export.check_fits(scorer.model, new, where=meta.path)
        elif not meta.path.is_dir():
            raise BadInputError(f"{meta.path}: there is no such checkpoint folder.")
    except BadInputError as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)
    if new is not None:
        export.copy_into(scorer.model, new, engine.mesh.world, engine.device)
        return
    optimizer = engine.optimizer if meta.with_optim else None
    try:
        state = checkpoint.load_state(meta.path, scorer.model, optimizer, rank=engine.mesh.rank, device=engine.device)
    except BadInputError as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)
    engine.version, engine.steps = int(state["version"]), int(state["steps"])
    if engine.schedule is not None and meta.with_optim:
        engine.schedule.load(int(state["schedule_step"]))


def save_adapter(engine: FSDPEngine, path: Path) -> None:
    """Write the LoRA adapter alone, in peft's layout."""
    engine.ready()
    if engine.peft is None:
        raise BadInputError("lora: not set, so there is no adapter to save.")
    _check_save_path(engine, path)
    trained = {n: export.full(p).cpu() for n, p in engine.peft.named_parameters() if p.requires_grad}
    error: Exception | None = None
    try:
        if engine.mesh.rank == 0:
            lora.write_adapter(engine.peft, trained, path, base=engine.folder, is_critic=engine.is_critic)
    except Exception as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)


def save_hf(engine: FSDPEngine, path: Path, *, tokenizer: Any) -> None:
    """Write the weights, adapters merged, in Hugging Face layout."""
    scorer = engine.ready()
    _check_save_path(engine, path)
    tensors = export.hf_tensors(scorer.model)
    error: Exception | None = None
    try:
        if engine.mesh.rank == 0:
            hf_folder.write_hf_folder(
                scorer.model,
                tensors,
                path,
                tokenizer=tokenizer,
                max_shard_size=engine.options.max_shard_size,
                source=engine.folder,
            )
    except ArealError as caught:
        error = caught
    except Exception as caught:
        error = save_error(path, caught)
    # The other ranks, and this one after an error, take part in what is left of the gathering.
    for _ in tensors:
        pass
    comm.raise_together(error, engine.mesh.world, engine.device)


def _check_not_quantized(engine: FSDPEngine) -> None:
    if engine.config.quantization is not None:
        raise BadInputError(
            f"quantization: a model with {engine.config.quantization} weights is neither saved nor loaded again; it is "
            "read from its path at the start."
        )


def _check_save_path(engine: FSDPEngine, path: Path) -> None:
    error: Exception | None = None
    try:
        if engine.mesh.rank == 0:
            hf_folder.check_empty(path)
    except BadInputError as caught:
        error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)
