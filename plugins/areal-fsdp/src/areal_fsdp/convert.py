"""``areal convert`` for checkpoints of the fsdp engine: in one process, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areal_core.api.configs import TrainEngineConfig
from areal_core.errors import BadInputError
from areal_fsdp import checkpoint, export, loading, lora
from areal_fsdp.config import FSDPConfig
from areal_fsdp.hf_folder import write_hf_folder

_CPU = torch.device("cpu")


def convert(source: Path, target: Path, *, to: str, config: TrainEngineConfig, role: str) -> None:
    """Read ``source`` and fill the empty folder ``target``; see ``TrainEngine.convert``."""
    folder = loading.resolve_folder(config.path, key=f"{role}.path" if to == "hf" else "SRC")
    generator = torch.get_rng_state()
    try:
        if to == "hf":
            _to_hf(source, target, folder, config, role)
        else:
            model = _build(folder, config, role, from_scratch=False)
            meta = {"version": 0, "steps": 0, "schedule_step": 0}
            checkpoint.save_state(target, model, None, meta=meta, rank=0, device=_CPU)
    finally:
        torch.set_rng_state(generator)


def _to_hf(source: Path, target: Path, folder: Path, config: TrainEngineConfig, role: str) -> None:
    checkpoint.read_meta(source)
    model = _build(folder, config, role, from_scratch=True)
    if config.lora is not None:
        lora.add_lora(model, config.lora)
    checkpoint.load_state(source, model, None, rank=0, device=_CPU)
    options: FSDPConfig = config.options or FSDPConfig()
    write_hf_folder(
        model,
        export.hf_tensors(model),
        target,
        tokenizer=_tokenizer(folder, config),
        max_shard_size=options.max_shard_size,
        source=folder,
    )


def _build(folder: Path, config: TrainEngineConfig, role: str, *, from_scratch: bool) -> Any:
    hf_config = loading.load_hf_config(folder, trust_remote_code=config.trust_remote_code)
    is_critic = role in ("critic", "reward") or (
        not from_scratch and "ForSequenceClassification" in " ".join(hf_config.architectures or [])
    )
    return loading.build_model(
        folder,
        hf_config=hf_config,
        is_critic=is_critic,
        from_scratch=from_scratch,
        param_dtype=loading.DTYPES[config.param_dtype],
        attn_impl=config.attn_impl,
        trust_remote_code=config.trust_remote_code,
    )


def _tokenizer(folder: Path, config: TrainEngineConfig) -> Any:
    """The tokenizer that lies beside the model's configuration; None where there is none."""
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{folder}: its tokenizer cannot be read ({str(error).splitlines()[0]}).") from error
