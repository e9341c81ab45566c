"""Options of the ``fsdp`` engine, in YAML under ``actor.fsdp``, ``ref.fsdp`` or ``critic.fsdp``."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from areal_core.config.fields import option


def _is_size(instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    if re.fullmatch(r"\d+(\.\d+)?(KB|MB|GB|TB)", value) is None:
        raise ValueError(f"must be a number and KB, MB, GB or TB, such as 5GB, got {value!r}")


@attrs.define(kw_only=True)
class FSDPConfig:
    """Options of the FSDP train engine."""

    share_prompts: bool = option(True, "Compute the prompt that the samples of a group share only once.")
    logits_chunk_tokens: int | None = option(
        None,
        "As many logits exist at one time as this many tokens have, others are computed again in the backward pass; "
        "null: 16 million (64 MiB).",
        ge=1,
    )
    disable_dropout: bool = option(
        True, "Switch off the dropout of the model itself (not LoRA's), so that training sees the sampler's policy."
    )
    replicate: int = option(
        1,
        "HSDP: copies of the sharded parameters; it divides d, and each copy is sharded over d / replicate x c ranks.",
        ge=1,
    )
    recompute: Literal["layers", "ops"] = option(
        "layers",
        "What `gradient_checkpointing: selective` recomputes: every n-th layer, or of all layers everything but "
        "products of matrices and attention.",
    )
    recompute_every: int = option(2, "That n: the first of every n layers is recomputed.", ge=1)
    sequence_parallel: bool = option(
        True, "With t > 1: norms and the residual stream hold a part of the tokens on each rank, not all of them."
    )
    reshard_after_forward: bool = option(True, "Free gathered parameters of a layer between forward and backward.")
    wrap_layers: list[str] = option(
        factory=list, help="Classes whose modules are gathered one at a time; none: the model's decoder layers."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Type in which gradients are added up over the data-parallel ranks."
    )
    float8: Literal["none", "tensorwise", "rowwise", "emulated"] = option(
        "none",
        "Train with float8 products of matrices (torchao), scaled by tensor or by row; emulated: the numerics of "
        "tensorwise on any device, slowly.",
    )
    cpu_offload: bool = option(False, "Keep sharded parameters, gradients and optimizer state in host memory.")
    max_shard_size: str = option("5GB", "Largest safetensors file of an export.", validator=_is_size)
