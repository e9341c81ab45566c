"""New weights for a model that is in use: everything is checked before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from areal_core.errors import BadInputError, did_you_mean


def plan_update(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]], source: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Match named tensors with the model's own.

    Args:
        model: a transformers model.
        tensors: (name in Hugging Face layout, full tensor). Every parameter must be covered; tied ones by any of
            their names. Buffers that the model saves may be given.
        source: what the error messages call the tensors.

    Returns:
        (own tensor, new tensor) pairs, one for each own tensor that is given.

    Raises:
        BadInputError: for a name the model lacks, a parameter that is missing, or another shape.
    """
    own = dict(model.state_dict(keep_vars=True))
    prefix = getattr(model, "base_model_prefix", "")
    ignored = [re.compile(pattern) for pattern in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, tensor in tensors:
        # Checkpoints of a bare base model lack the prefix.
        target = own.get(name, own.get(f"{prefix}.{name}"))
        if target is None:
            if any(pattern.search(name) for pattern in ignored):
                continue
            raise BadInputError(f"{source}: the model has no weight {name!r}.{did_you_mean(name, own)}")
        if target.shape != tensor.shape:
            raise BadInputError(
                f"{source}: {name!r} has shape {list(tensor.shape)}, but the model's has {list(target.shape)}"
            )
        pairs[id(target)] = (target, tensor)
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in pairs]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise BadInputError(f"{source}: weights are missing: {shown}. A full set of weights is needed.")
    return list(pairs.values())


def apply_update(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy in place, with a cast where the types differ; memory that is shared already is not copied."""
    with torch.no_grad():
        for own, new in pairs:
            if own.data_ptr() != new.data_ptr() or own.dtype != new.dtype:
                own.copy_(new)


def read_safetensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a Hugging Face folder: ``model.safetensors``, or the files of its index.

    Raises:
        BadInputError: if a file is missing or broken.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInputError(f"{index}: not a safetensors index: {error}") from error
    else:
        files = ["model.safetensors"]
    tensors: list[tuple[str, torch.Tensor]] = []
    for file in files:
        path = folder / file
        if not path.is_file():
            raise BadInputError(f"{path}: no such file. Expected safetensors in Hugging Face layout.")
        try:
            with safe_open(str(path), framework="pt") as handle:
                tensors += [(name, handle.get_tensor(name)) for name in handle.keys()]  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{path}: not a readable safetensors file: {error}") from error
    return tensors
