"""Weights by their Hugging Face names: streamed, written to a folder, and read back."""

from __future__ import annotations

import json
import os
import shutil
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

#: What a vision-language model needs beside its tokenizer; training does not change it.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
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


def checkpoint_specs(model: Any) -> list[tuple[str, list[int], str]]:
    """(name, shape, dtype) of what ``checkpoint_tensors`` gives, in its order. Local: nothing is gathered.

    Raises:
        BadInputError: if the layout of the files cannot be made of one tensor at a time.
    """
    shapes = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in hf_parameters(model).items()
    }
    specs = {name: value for entry in shapes.items() for name, value in _one_by_its_file_name(model, entry)}
    whole = shapes if lora_layers(model) else _checkpoint_names(model, shapes)
    if {name: value.shape for name, value in specs.items()} != {name: value.shape for name, value in whole.items()}:
        raise BadInputError(
            f"weight_update.type: the weights of {type(model).__name__} cannot be sent one at a time, because their "
            "files hold some of them in another layout. Use 'disk'."
        )
    return [(name, list(value.shape), dtype_name(value)) for name, value in specs.items()]


def checkpoint_tensors(model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """``hf_tensors`` by the names and in the layout that the files of a Hugging Face folder have."""
    for entry in tensors:
        yield from _one_by_its_file_name(model, entry)


def _one_by_its_file_name(model: Any, entry: tuple[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if lora_layers(model):
        yield entry
    else:
        yield from _checkpoint_names(model, dict([entry])).items()


def write_hf_folder(
    model: Any, tensors: dict[str, torch.Tensor], path: Path, *, tokenizer: Any, max_shard_size: str, source: Path
) -> None:
    """Write safetensors (with an index if sharded), config, generation config and tokenizer. On one rank only.

    What configures the images' processor is copied from the folder ``source`` that the model was loaded from.

    Raises:
        BadInputError: if the folder holds something.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    if not lora_layers(model):
        tensors = _checkpoint_names(model, tensors)
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for filename, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name].contiguous() for name in names}
        save_file(shard, path / filename, metadata={"format": "pt"})
        _fsync(path / filename)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model.config.architectures = [type(model).__name__]
    use_cache, model.config.use_cache = model.config.use_cache, True
    model.config.save_pretrained(path)
    model.config.use_cache = use_cache
    for filename in plan.filename_to_tensors:
        # safetensors writes files that only their owner can read.
        shutil.copymode(path / "config.json", path / filename)
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(path)
    if getattr(model.config, "auto_map", None):
        for code in source.glob("*.py"):
            shutil.copy(code, path / code.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    for name in _PROCESSOR_FILES:
        if (source / name).is_file() and not (path / name).exists():
            shutil.copy(source / name, path / name)


def _checkpoint_names(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo what transformers does to names and layouts on loading (e.g. the experts of one layer in one tensor)."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def check_empty(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInputError(f"{path}: not an empty folder. Save to a new one.")


def replace_folder(partial: Path, path: Path) -> None:
    """Put a finished folder in its place; a reader sees the old one or the new one, whole."""
    _fsync(partial)
    if path.exists():
        old = path.with_name(f".{path.name}.old-{os.getpid()}")
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old)
    else:
        partial.rename(path)
    _fsync(path.parent)


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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
