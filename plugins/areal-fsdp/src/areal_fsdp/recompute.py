"""Gradient checkpointing: what the forward pass keeps, and what the backward pass computes again."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from areal_core.errors import ConfigError

#: Products of matrices and attention: nearly all of the arithmetic, and not much of the memory.
_KEPT_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def enable_recomputation(
    model: Any, mode: Literal["full", "selective"], *, selection: Literal["layers", "ops"] = "layers", every: int = 2
) -> None:
    """Recompute decoder layers of a transformers model in the backward pass; gradients stay what they are.

    Args:
        mode: ``full`` recomputes every layer and keeps its input alone.
        selection: of ``selective``: ``layers`` recomputes every ``every``-th layer, beginning with the first; ``ops``
            recomputes all of every layer but products of matrices and attention (Korthikanti et al.,
            arXiv:2205.05198, choose what to recompute the same way: by its cost).

    Raises:
        BadInputError: if the architecture does not support it.
    """
    arguments: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective" and selection == "ops":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
            model.activation_checkpointing_enable(arguments)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} does not support it ({error}). Use none.", key="gradient_checkpointing"
        ) from error
    if mode == "selective" and selection == "layers":
        for index, layer in enumerate(_layers(model)):
            layer.gradient_checkpointing = index % every == 0


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _layers(model: nn.Module) -> list[Any]:
    """Modules that recompute themselves, outermost first; those within another one do not count."""
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func") and _is_layer(module) and id(module) not in inside:
            found.append(module)
            inside |= {id(child) for child in module.modules()}
    return found


def _is_layer(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)
