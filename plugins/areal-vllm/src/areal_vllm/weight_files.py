"""What safetensors hold, read from their headers alone, and whether it is what a server's model needs.

Servers load weights layer by layer: one that finds a wrong tensor in the middle keeps half of the new model. So
everything that can be known before is checked before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.errors import BadInputError

Shapes = dict[str, tuple[int, ...]]
_MOST_HEADER = 100 << 20
#: Of checkpoints that vLLM skips and trainers leave out.
_NOT_TRAINED = ("rotary_emb.inv_freq",)


def folder_shapes(folder: Path, pattern: str = "*.safetensors") -> Shapes:
    """``name -> shape`` of all tensors in a folder.

    Raises:
        BadInputError: if there are none, or a file is damaged.
    """
    files = sorted(folder.glob(pattern))
    if not files:
        found = "there is no such folder" if not folder.is_dir() else f"it holds no {pattern}"
        raise BadInputError(f"weight update: cannot load {folder}: {found}.")
    shapes: Shapes = {}
    for file in files:
        shapes.update(file_shapes(file))
    return shapes


def file_shapes(file: Path) -> Shapes:
    """``name -> shape`` of one safetensors file.

    Raises:
        BadInputError: if it is damaged or cut off.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if end != size:
                raise ValueError(f"it has {size} bytes instead of {end}")
            return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise BadInputError(f"weight update: {file} is not a whole safetensors file ({error}).") from error


def check_same(new: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Raise unless ``new`` are weights of ``model``: the same names, each in the same shape.

    Args:
        tied: whether the head is the embeddings, so that it may be left out or given twice.

    Raises:
        BadInputError: naming the first tensor that is missing, unknown or of another shape.
    """

    def is_free(name: str) -> bool:
        return name.endswith(_NOT_TRAINED) or (tied and name.endswith("lm_head.weight"))

    for name, shape in new.items():
        expected = model.get(name)
        if expected is None:
            if not is_free(name):
                raise BadInputError(f"weight update: the servers' model has no tensor {name!r}.{_STAYS}")
        elif expected != shape:
            raise BadInputError(
                f"weight update: tensor {name!r} has shape {list(shape)}, the servers' model needs {list(expected)}."
                f"{_STAYS}"
            )
    for name in model:
        if name not in new and not is_free(name):
            raise BadInputError(f"weight update: tensor {name!r} of the servers' model is missing.{_STAYS}")


_STAYS = " The servers keep the weights that they have."


def ties_embeddings(folder: Path) -> bool:
    """Whether the model's configuration says that head and embeddings are one tensor."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    sections = [config, config.get("text_config") or {}]
    return any(section.get("tie_word_embeddings") for section in sections)
