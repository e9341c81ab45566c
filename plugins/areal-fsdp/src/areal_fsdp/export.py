"""Weights by their Hugging Face names: streamed, and read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from areal_core.api.weight_sender import dtype_name
from areal_core.errors import BadInputError
from areal_fsdp.lora import lora_layers, merged_weight
from areal_fsdp.low_precision import local
from areal_fsdp.shards import local_part

_SAVED, _ORIGINAL, _BASE = ".modules_to_save.default", ".original_module", ".base_layer"


def full(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached; a collective where it is sharded."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a parameter of the live model; None for what has none (adapters, frozen originals)."""
    if ".lora_" in name or f"{_ORIGINAL}." in name:
        return None
    return name.replace(_SAVED, "").replace(_BASE, "")


def hf_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """``Hugging Face name -> live parameter or persistent buffer`` (perhaps sharded); tied ones once."""
    persistent = model.state_dict(keep_vars=True)
    entries = dict(model.named_parameters())
    entries.update((name, value) for name, value in model.named_buffers() if name in persistent)
    return {renamed: value for name, value in entries.items() if (renamed := hf_name(name)) is not None}


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of every weight, tied ones once, adapters merged into new tensors; one at a time.

    Every rank must run through all of it. Without adapters and sharding the tensors are the live ones.
    """
    layers = {f"{hf_name(f'{name}.')}weight": layer for name, layer in lora_layers(model).items()}
    for name, value in hf_parameters(model).items():
        weight = full(value)
        layer = layers.get(name)
        if layer is not None:
            a, b = full(layer.lora_A["default"].weight), full(layer.lora_B["default"].weight)
            weight = merged_weight(layer, weight, a, b)
        yield name, weight
        # Not to be held while the next one is gathered.
        del weight


def streamed_layout(model: Any) -> dict[str, torch.Tensor] | None:
    """What ``checkpoint_tensors`` gives, in its order, on the meta device. Local: nothing is gathered.

    Returns:
        None if the layout of the files cannot be made of one tensor at a time.
    """
    shapes = {name: _meta(value) for name, value in hf_parameters(model).items()}
    layout = {name: _meta(value) for entry in shapes.items() for name, value in _one_by_its_file_name(model, entry)}
    whole = shapes if lora_layers(model) else checkpoint_names(model, shapes)
    same = {name: value.shape for name, value in layout.items()} == {n: value.shape for n, value in whole.items()}
    return layout if same else None


def _meta(value: torch.Tensor) -> torch.Tensor:
    """Of the same shape and type, and no view of anything: its size is its own."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def checkpoint_specs(model: Any) -> list[tuple[str, list[int], str]]:
    """(name, shape, dtype) of what ``checkpoint_tensors`` gives, in its order. Local: nothing is gathered.

    Raises:
        BadInputError: if the layout of the files cannot be made of one tensor at a time.
    """
    layout = streamed_layout(model)
    if layout is None:
        raise BadInputError(
            f"weight_update.type: the weights of {type(model).__name__} cannot be sent one at a time, because their "
            "files hold some of them in another layout. Use 'disk'."
        )
    return [(name, list(value.shape), dtype_name(value)) for name, value in layout.items()]


def checkpoint_tensors(model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """``hf_tensors`` by the names and in the layout that the files of a Hugging Face folder have."""
    for entry in tensors:
        yield from _one_by_its_file_name(model, entry)
        del entry


def _one_by_its_file_name(model: Any, entry: tuple[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if lora_layers(model):
        yield entry
    else:
        yield from checkpoint_names(model, dict([entry])).items()


def checkpoint_names(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo what transformers does to names and layouts on loading (e.g. the experts of one layer in one tensor)."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def check_fits(model: nn.Module, source: nn.Module, *, where: Path) -> None:
    """Raise unless ``source`` has every weight of ``model`` in the same shape.

    Raises:
        BadInputError: naming the first tensor that is missing or has another shape.
    """
    new = hf_parameters(source)
    for name, value in hf_parameters(model).items():
        if name not in new:
            raise BadInputError(f"{where}: tensor {name!r} is missing.")
        if new[name].shape != value.shape:
            raise BadInputError(
                f"{where}: tensor {name!r} has shape {tuple(new[name].shape)}, the model needs {tuple(value.shape)}."
            )


def copy_into(
    model: nn.Module, source: nn.Module, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Copy the weights of an unsharded model that fits. Adapters of ``model`` are set to add nothing. Collective.

    Args:
        source: its tensors count on the group's first rank; elsewhere it may be on the meta device.
        device: where they are broadcast.
    """
    new = hf_parameters(source)
    with torch.no_grad():
        for name, value in hf_parameters(model).items():
            whole = new[name]
            if group is not None:
                if whole.device.type == "meta":
                    whole = torch.empty(whole.shape, dtype=value.dtype, device=device)
                whole = whole.detach().to(device, value.dtype).contiguous()
                dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
            local(value).copy_(local_part(whole, value))
        for layer in lora_layers(model).values():
            layer.lora_B["default"].weight.zero_()
