"""What engines share for vision-language models: which models they are, and which tokens stand for images.

The tensors of a sequence's images have the names of the model's own arguments (``pixel_values``, ``image_grid_thw``,
...), as its processor makes them; a mapping of them is the ``multi_modal_input`` of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal_core.errors import BadInputError

if TYPE_CHECKING:
    import torch

#: For each modality (1 image, 2 video): where the configuration names its placeholder, and the sizes of what it stands
#: for, by which ``pixel_values`` of any number of patches are told apart.
_MODALITIES = (
    (1, ("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw"),
    (2, ("video_token_id", "video_token_index"), "pixel_values_videos", "video_grid_thw"),
)


def is_vision_language(config: Any) -> bool:
    """Whether a transformers configuration is of a model that reads images (``AutoModelForImageTextToText``).

    Where transformers knows a type as a text model too, the ``architectures`` of the configuration decide.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = getattr(config, "model_type", None)
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if name is None or getattr(config, "vision_config", None) is None:
        return False
    names = (name,) if isinstance(name, str) else tuple(name)
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or any(n in names for n in config.architectures or ())


def placeholder_ids(config: Any) -> list[int]:
    """The ids that stand for images and videos."""
    found = (next((getattr(config, n) for n in names if hasattr(config, n)), None) for _, names, _, _ in _MODALITIES)
    return [token for token in found if token is not None]


def vision_token_types(config: Any, input_ids: torch.Tensor, images: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which tokens of one sequence stand for its images.

    The first ones of their id do, as many as the images have features; a placeholder that a model sampled later is
    text.

    Args:
        config: of the model.
        input_ids: int64 ``[L]``.
        images: the sequence's ``multi_modal_input``.

    Returns:
        int64 ``[L]``: 0 text, 1 image, 2 video, which transformers calls ``mm_token_type_ids``.

    Raises:
        BadInputError: if there are fewer placeholders than features.
    """
    import torch

    types = torch.zeros_like(input_ids)
    for kind, names, pixels, grid in _MODALITIES:
        token = next((getattr(config, name) for name in names if hasattr(config, name)), None)
        if token is None or pixels not in images:
            continue
        places = torch.nonzero(input_ids == token)[:, 0]
        if grid in images:
            count = int(images[grid].prod(-1).sum()) // config.vision_config.spatial_merge_size**2
            if len(places) < count:
                raise BadInputError(
                    f"multi_modal_input: {grid} {images[grid].tolist()} has {count} features, but input_ids has only "
                    f"{len(places)} tokens {token} that stand for them. Let the model's processor write the prompt."
                )
            places = places[:count]
        types[places] = kind
    return types


def rope_positions(
    model: Any, input_ids: torch.Tensor, types: torch.Tensor, images: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, int] | None:
    """The positions of one sequence in time, height and width, for models that have such (Qwen2-VL and its kind).

    Args:
        model: with or without a head.
        input_ids: int64 ``[L]``.
        types: of ``vision_token_types``.
        images: the sequence's ``multi_modal_input``.

    Returns:
        int64 ``[3, L]``, and what is added to the index of a later token to get its position; None where the model's
        positions are the indices.
    """
    import torch

    base = model.base_model
    if not hasattr(base, "get_rope_index"):
        return None
    if not types.any():
        return torch.arange(len(input_ids), device=input_ids.device).expand(3, -1), 0
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    given = {name: images[name] for name in names if name in images}
    positions, delta = base.get_rope_index(input_ids[None], mm_token_type_ids=types[None], **given)
    return positions[:, 0], int(delta)


@contextmanager
def placeholders_as_text(model: Any, input_ids: torch.Tensor, types: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inside, the model sees ``input_ids`` whose placeholders without an image are embedded like any other token.

    Models find the places of their images by the id alone.

    Args:
        input_ids, types: of equal shape.

    Yields:
        What to call the model with.
    """
    import torch

    text = (types == 0) & torch.isin(input_ids, torch.tensor(placeholder_ids(model.config), device=input_ids.device))
    if not text.any():
        yield input_ids
        return
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: (input_ids, *args[1:]))
    try:
        yield input_ids.masked_fill(text, 0)
    finally:
        handle.remove()
