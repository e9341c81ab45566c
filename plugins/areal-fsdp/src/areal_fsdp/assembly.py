"""From a configuration to a model that is loaded, split over the mesh, and ready to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from areal_core.api.configs import TrainEngineConfig
from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_fsdp import comm, loading, lora
from areal_fsdp.config import FSDPConfig
from areal_fsdp.materialize import fill, make_buffers
from areal_fsdp.mesh import Mesh
from areal_fsdp.parallel import broadcast_weights, build_scorer, check_parallel, shard_model
from areal_fsdp.quantization import check_quantization, quantize_weights, use_float8
from areal_fsdp.recompute import enable_recomputation
from areal_fsdp.scorer import Scorer
from areal_fsdp.tensor_parallel import check_heads
from areal_fsdp.weight_source import FileSource, ModelSource, NeedsWholeModel, WeightSource

logger = getLogger("FSDPEngine")


@attrs.frozen(eq=False)
class Assembled:
    """A model on its mesh.

    Attributes:
        folder: where it was loaded from.
        peft: the model with its LoRA adapters, or None.
    """

    folder: Path
    scorer: Scorer
    peft: Any
    compute_dtype: torch.dtype


def is_critic(role: str) -> bool:
    return role in ("critic", "reward")


def assemble(config: TrainEngineConfig, options: FSDPConfig, mesh: Mesh, role: str) -> Assembled:
    """Load a model and split it. Collective.

    Raises:
        BadInputError: on every rank, if the model cannot be loaded, or not be what the options ask for.
    """
    compute_dtype = _check_dtypes(config, role)
    check_quantization(config, options, mesh, key=role)
    # Of 8-bit weights every rank holds all.
    streamed = mesh.world is not None and config.quantization is None
    error: Exception | None = None
    peft = source = None
    try:
        folder = loading.resolve_folder(config.path, key=f"{role}.path")
        # What is drawn for a model without memory is lost: the draws of the weights must be those of one process.
        with torch.random.fork_rng(devices=[], enabled=streamed):
            model: Any = whole_model(config, mesh, folder, role, from_scratch=config.init_from_scratch, meta=streamed)
            check_parallel(model, mesh, config, options, key=role)
            if options.disable_dropout:
                loading.disable_dropout(model)
            if config.lora is not None:
                peft = lora.add_lora(model, config.lora)
        if streamed and mesh.rank == 0:
            source = _open_weights(config, mesh, folder, role, model)
    except BadInputError as caught:
        error = caught
    comm.raise_together(error, mesh.world, mesh.device)
    if config.optimizer is None:
        model.requires_grad_(False)
    if config.recomputation != "none":
        enable_recomputation(model, config.recomputation, selection=options.recompute, every=options.recompute_every)
    if options.float8 != "none":
        use_float8(model, options.float8)
    if streamed:
        make_buffers(model, mesh.device)
    else:
        model.to(mesh.device)
        if mesh.world is not None:
            broadcast_weights(model, mesh.world)
    if config.quantization is not None:
        quantize_weights(model.to(compute_dtype), config.quantization)
    scorer = build_scorer(model, mesh, config, options, is_critic=is_critic(role))
    if streamed and mesh.world is not None:
        shard_model(scorer, mesh, compute_dtype, options)
        storage = torch.device("cpu") if options.cpu_offload else mesh.device
        fill(model, source, mesh.world, mesh.device, storage=storage)
    if not scorer.is_packed and mesh.rank == 0:
        logger.warning(
            "%s runs on padded batches: packed attention is off for it (attention %s)",
            type(model).__name__,
            model.config._attn_implementation,
        )
    return Assembled(folder, scorer, peft, compute_dtype)


def whole_model(
    config: TrainEngineConfig, mesh: Mesh, folder: Path, role: str, *, from_scratch: bool, meta: bool = False
) -> nn.Module:
    """The whole model of a folder on the CPU (or the meta device), as the role and the configuration want it."""
    hf_config = loading.load_hf_config(folder, trust_remote_code=config.trust_remote_code)
    check_heads(hf_config, tensor=mesh.tp_size, context=mesh.cp_size, key=f"{role}.backend")
    return loading.build_model(
        folder,
        hf_config=hf_config,
        is_critic=is_critic(role),
        from_scratch=from_scratch,
        param_dtype=loading.DTYPES[config.param_dtype],
        attn_impl=config.attn_impl,
        trust_remote_code=config.trust_remote_code,
        meta=meta,
    )


def _check_dtypes(config: TrainEngineConfig, role: str) -> torch.dtype:
    if config.dtype != config.param_dtype and config.param_dtype != "float32":
        raise BadInputError(
            f"{role}.dtype: computing in {config.dtype} with parameters in {config.param_dtype} is not supported. "
            "Set param_dtype to float32, or both to the same type."
        )
    if config.dtype == "float16" and config.optimizer is not None:
        raise BadInputError(f"{role}.dtype: training in float16 needs loss scaling, which is not there. Use bfloat16.")
    return loading.DTYPES[config.dtype]


def _open_weights(config: TrainEngineConfig, mesh: Mesh, folder: Path, role: str, model: nn.Module) -> WeightSource:
    """On rank 0: what fills ``model``, which is on the meta device."""
    from_scratch, with_lora = config.init_from_scratch, config.lora is not None
    if not from_scratch and not with_lora:
        try:
            return FileSource(folder, model)
        except NeedsWholeModel:
            pass
    # What is drawn at random must be drawn as one process draws it: by a model that is whole.
    whole = whole_model(config, mesh, folder, role, from_scratch=from_scratch)
    if config.lora is not None:
        lora.add_lora(whole, config.lora)
    return ModelSource(whole)
