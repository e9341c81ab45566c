"""A Hugging Face folder, written one safetensors file at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from areal_core.errors import BadInputError
from areal_fsdp import export

#: What a vision-language model needs beside its tokenizer; training does not change it.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def write_hf_folder(
    model: Any,
    tensors: Iterator[tuple[str, torch.Tensor]],
    path: Path,
    *,
    tokenizer: Any,
    max_shard_size: str,
    source: Path,
) -> None:
    """Write safetensors (with an index if sharded), config, generation config and tokenizer. On one rank only.

    What configures the images' processor is copied from the folder ``source`` that the model was loaded from.

    Args:
        tensors: ``export.hf_tensors`` of ``model``. At most one file's worth of them and one more are held at a time;
            all of them where the files of this architecture have another layout, made of several tensors.
    """
    path.mkdir(parents=True, exist_ok=True)
    layout = export.streamed_layout(model)
    if layout is None:
        whole = export.checkpoint_names(model, {name: tensor.cpu() for name, tensor in tensors})
        whole = {name: _alone(tensor) for name, tensor in whole.items()}
        files = _write_tensors(whole, iter(whole.items()), path, max_shard_size)
    else:
        files = _write_tensors(layout, export.checkpoint_tensors(model, tensors), path, max_shard_size)
    model.config.architectures = [type(model).__name__]
    use_cache, model.config.use_cache = model.config.use_cache, True
    model.config.save_pretrained(path)
    model.config.use_cache = use_cache
    for filename in files:
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


def _write_tensors(
    layout: dict[str, torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]], path: Path, max_shard_size: str
) -> list[str]:
    """Write ``tensors``, whose names, shapes and order are those of ``layout``; returns the names of the files."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(layout, max_shard_size=max_shard_size)
    open_files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        filename = plan.tensor_to_filename[name]
        shard = open_files.setdefault(filename, {})
        shard[name] = _alone(tensor.cpu())
        del tensor
        if len(shard) == len(plan.filename_to_tensors[filename]):
            save_file(open_files.pop(filename), path / filename, metadata={"format": "pt"})
            shard.clear()
            fsync(path / filename)
    if open_files:
        raise RuntimeError(f"{sorted(open_files)} were not filled")
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(plan.filename_to_tensors)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and without the rest of what it is a view of."""
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor.contiguous()


def check_empty(path: Path) -> None:
    """Raise unless something can be saved there.

    Raises:
        BadInputError: if it holds something.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInputError(f"{path}: not an empty folder. Save to a new one.")


def replace_folder(partial: Path, path: Path) -> None:
    """Put a finished folder in its place; a reader sees the old one or the new one, whole."""
    fsync(partial)
    if path.exists():
        old = path.with_name(f".{path.name}.old-{os.getpid()}")
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old)
    else:
        partial.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
