"""From the train engine to the inference engine: by memory or by disk."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import BadInputError
from areal_fsdp import comm, export, storage

if TYPE_CHECKING:
    from areal_fsdp.engine import FSDPEngine


def check_type(meta: WeightUpdateMeta) -> None:
    if meta.type not in ("memory", "disk"):
        raise BadInputError(
            f"weight_update.type: the fsdp engine cannot do {meta.type!r} yet. Use 'memory' (an engine in this "
            "process) or 'disk'."
        )


def update_weights(engine: FSDPEngine, meta: WeightUpdateMeta) -> None:
    """Send the weights to ``engine.inference`` on global rank 0. Every rank calls it, and every rank sees an error."""
    check_type(meta)
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
            raise BadInputError("weight_update: type disk needs a path.")
        partial = meta.path.with_name(f".{meta.path.name}.partial")
        if rank == 0 and partial.exists():
            shutil.rmtree(partial)
        storage.save_hf(engine, partial, tokenizer=None)
        try:
            if rank == 0:
                export.replace_folder(partial, meta.path)
                if engine.inference is not None:
                    engine.inference.update_weights_from_disk(meta)
        except Exception as caught:
            error = caught
    comm.raise_together(error, engine.mesh.world, engine.device)
