"""Images in a packed batch: the tensors of its sequences, and what a rank without any runs in their place."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from areal_core.api.batch import PackedBatch
from areal_core.api.vision import is_vision_language, rope_positions, vision_token_types
from areal_core.errors import BadInputError
from areal_fsdp import comm

#: Model types whose images attend causally, as text does, so that packed attention is theirs: they have positions in
#: time, height and width (``get_rope_index``). Others run on padded batches, with the masks that transformers makes.
PACKED_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})

Images = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class VisionBatch:
    """What a packed batch of ``T`` tokens has beside text.

    Attributes:
        images: of each sequence.
        types: int64 ``[T]``: 0 text, 1 image, 2 video.
        positions: int64 ``[3, T]``, or None where they are the indices in the sequence.
        specimen: an image that another rank has and this one runs along, for the sake of collectives.
    """

    images: Sequence[Images]
    types: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    specimen: tuple[list[int], Images] | None = None


@attrs.frozen(eq=False)
class VisionInput:
    """The images among ``M`` model rows.

    Attributes:
        tensors: arguments of the model: the images of all sequences, in the order of their rows.
        types: int64 ``[M]``: 0 text, 1 image, 2 video.
    """

    tensors: dict[str, torch.Tensor]
    types: torch.Tensor

    def to(self, device: torch.device) -> VisionInput:
        tensors = {name: value.to(device, non_blocking=True) for name, value in self.tensors.items()}
        return VisionInput(tensors, self.types.to(device, non_blocking=True))


def read_images(model: Any, batch: PackedBatch) -> VisionBatch | None:
    """The images of a batch on the CPU; None if it has none.

    Raises:
        BadInputError: if the model cannot read them, or they do not fit the tokens.
    """
    if not any(batch.multi_modal_input or ()):
        return None
    config = model.config
    if not is_vision_language(config):
        raise BadInputError(
            f"multi_modal_input: model type {config.model_type!r} reads text only. Use a vision-language model."
        )
    assert batch.multi_modal_input is not None
    known = inspect.signature(model.base_model.forward).parameters
    types: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for ids, images in zip(batch.sequences("input_ids"), batch.multi_modal_input, strict=True):
        for name in images:
            if name not in known:
                raise BadInputError(f"multi_modal_input: {type(model).__name__} has no argument {name!r}.")
        types.append(vision_token_types(config, ids, images))
        found = rope_positions(model, ids, types[-1], images)
        if found is not None:
            positions.append(found[0])
    return VisionBatch(
        batch.multi_modal_input,
        torch.cat(types).numpy(),
        torch.cat(positions, -1).numpy() if positions else None,
    )


def join_images(parts: Sequence[Images]) -> dict[str, torch.Tensor]:
    """The tensors of several sequences one after another."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def share_specimens(
    batches: Sequence[tuple[PackedBatch, VisionBatch | None]], group: dist.ProcessGroup | None, device: torch.device
) -> list[VisionBatch | None]:
    """Give a small image to each micro-batch that has none while the same one of another rank has. Collective.

    Sharded parameters of the vision tower are gathered by all ranks or by none. The image is as large as the smallest
    one of the other rank, and black; nothing attends to it.
    """
    visions = [vision for _, vision in batches]
    if group is None:
        return visions
    own = [None if vision is None else _specimen(batch, vision) for batch, vision in batches]
    everyone = comm.gather_json(own, group, device)
    result: list[VisionBatch | None] = []
    for (batch, vision), others in zip(batches, zip(*everyone, strict=True), strict=True):
        found = next((other for other in others if other is not None), None)
        if vision is None and found is not None:
            ids, tensors = found
            made = {
                name: (torch.tensor if exact else torch.zeros)(value, dtype=getattr(torch, kind))
                for name, (kind, exact, value) in tensors.items()
            }
            none = np.zeros(batch.num_tokens, np.int64)
            vision = VisionBatch([{}] * batch.num_seqs, none, None, (ids, made))
        result.append(vision)
    return result


def _specimen(batch: PackedBatch, vision: VisionBatch) -> tuple[list[int], dict[str, tuple[str, bool, Any]]]:
    """The placeholder ids of the sequence with the fewest, and its tensors: integers as they are, of others the shape.

    All of it is plain JSON.
    """
    bounds = batch.cu_seqlens.tolist()
    counts = [int((vision.types[a:b] > 0).sum()) for a, b in itertools.pairwise(bounds)]
    index = min((count, i) for i, count in enumerate(counts) if count > 0)[1]
    at = slice(bounds[index], bounds[index + 1])
    ids = batch.tokens["input_ids"][at][torch.from_numpy(vision.types[at] > 0)].tolist()
    tensors: dict[str, tuple[str, bool, Any]] = {}
    for name, value in vision.images[index].items():
        exact = not value.is_floating_point()
        kind = str(value.dtype).removeprefix("torch.")
        tensors[name] = (kind, exact, value.tolist() if exact else list(value.shape))
    return ids, tensors
