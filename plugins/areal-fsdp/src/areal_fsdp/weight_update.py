"""From the train engine to the inference engine: by memory, by disk, or the adapter alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import BadInputError
from areal_fsdp import comm, export, storage

if TYPE_CHECKING:
    from areal_core.api.engine_api import InferenceEngine
    from areal_fsdp.engine import FSDPEngine


def check_type(meta: WeightUpdateMeta, engine: FSDPEngine, inference: InferenceEngine | None) -> None:
    """Raise if the weights cannot go that way.

    Raises:
        BadInputError: naming ``weight_update.type``.
    """
    if meta.type not in ("memory", "disk", "lora"):
        raise BadInputError(
            f"weight_update.type: the fsdp engine cannot do {meta.type!r} yet. Use 'memory' (an engine in this "
            "process), 'disk', or 'lora' (the adapter alone)."
        )
    if meta.type != "lora":
        return
    if engine.config.lora is None:
        raise BadInputError("weight_update.type: 'lora' sends the adapter, but `lora` is not set. Use 'disk'.")
    if engine.config.lora.modules_to_save:
        raise BadInputError(
            "weight_update.type: 'lora' sends the adapter alone, but lora.modules_to_save trains whole modules beside "
            "it, which servers do not read from an adapter. Use 'disk', or leave modules_to_save out."
        )
    if inference is not None and not inference.takes_adapters:
        raise BadInputError(
            f"weight_update.type: {type(inference).__name__} takes no adapter. Use 'disk' or 'auto' (merged weights)."
        )


def update_weights(engine: FSDPEngine, meta: WeightUpdateMeta) -> None:
    """Send the weights to ``engine.inference`` on global rank 0. Every rank calls it, and every rank sees an error."""
    check_type(meta, engine, engine.inference)
    scorer, rank = engine.ready(), engine.mesh.rank
    if rank == 0 and engine.inference is None:
        raise RuntimeError("call connect_engine before update_weights")
    error: Exception | None = None
    if meta.type == "memory":
        tensors = export.hf_tensors(scorer.model)
        try:
            if engine.inference is not None:
                engine.inference.update_weights_from_memory(tensors, meta.version)
        except Exception as caught:
            error = caught
        # The other ranks, and this one after an error, must take part in what is left of the gathering.
        for _ in tensors:
            pass
    else:
        if meta.path is None:
            raise BadInputError(f"weight_update: type {meta.type} needs a path.")
        partial = meta.path.with_name(f".{meta.path.name}.partial")
        if rank == 0 and partial.exists():
            shutil.rmtree(partial)
        if meta.type == "lora":
            storage.save_adapter(engine, partial)
        else:
            storage.save_hf(engine, partial, tokenizer=None)
        try:
            if rank == 0:
                export.replace_folder(partial, meta.path)
                if engine.inference is not None:
                    engine.inference.update_weights_from_disk(meta)
        except Exception as caught:
            error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)
