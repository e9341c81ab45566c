"""From the train engine to the inference engine: by memory, by disk, by broadcast, or the adapter alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.api.weight_sender import WeightSender
from areal_core.errors import BadInputError
from areal_fsdp import comm, export, hf_folder, storage

if TYPE_CHECKING:
    from areal_core.api.engine_api import InferenceEngine
    from areal_fsdp.engine import FSDPEngine


def check_type(meta: WeightUpdateMeta, engine: FSDPEngine, inference: InferenceEngine | None) -> None:
    """Raise if the weights cannot go that way.

    Raises:
        BadInputError: naming ``weight_update.type``.
    """
    if meta.type == "distributed" and inference is not None and not inference.weight_receivers():
        raise BadInputError(
            f"weight_update.type: {type(inference).__name__} takes no weights over a process group. Use 'disk'."
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
    if meta.type in ("memory", "distributed"):
        tensors = export.hf_tensors(scorer.model)
        if meta.type == "distributed":
            specs = export.checkpoint_specs(scorer.model)
            tensors = export.checkpoint_tensors(scorer.model, tensors)
        try:
            if engine.inference is None:
                pass
            elif meta.type == "memory":
                engine.inference.update_weights_from_memory(tensors, meta.version)
            else:
                sender(engine, engine.inference).send(meta, specs, tensors)
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
                hf_folder.replace_folder(partial, meta.path)
                if engine.inference is not None:
                    engine.inference.update_weights_from_disk(meta)
        except Exception as caught:
            error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)


def sender(engine: FSDPEngine, inference: InferenceEngine) -> WeightSender:
    """Rank 0's end of the broadcast; it stays connected from one update to the next."""
    if engine.weight_sender is None or engine.weight_sender.engine is not inference:
        engine.weight_sender = WeightSender(inference, engine.device)
    return engine.weight_sender
