"""The processor of a vision-language model: its tokenizer, and what turns images into tensors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from areal_core.errors import BadInputError


def load_processor(path: str, *, trust_remote_code: bool = False, key: str = "tokenizer_path") -> Any:
    """The transformers processor of a Hugging Face folder or hub id.

    transformers prepares videos with torchvision. Where that is not installed, a processor is loaded without its video
    part: images need none of it.

    Raises:
        BadInputError: if there is none, as for a text model.
    """
    from transformers import AutoProcessor

    try:
        auto: Any = AutoProcessor
        if importlib.util.find_spec("torchvision") is None:
            auto = _without_video(path, trust_remote_code) or AutoProcessor
        processor = auto.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(f"{key}: no processor for images at {path!r} ({reason})") from error
    if not hasattr(processor, "image_processor"):
        raise BadInputError(
            f"{key}: {path!r} has no processor for images: its model reads text only. Use a vision-language model."
        )
    return processor


def _without_video(path: str, trust_remote_code: bool) -> Any:
    """The processor's class without its ``video_processor``; None if it has none, or it cannot be told."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = None
    for file in ("processor_config.json", "preprocessor_config.json"):
        config = Path(path) / file
        if name is None and config.is_file():
            name = json.loads(config.read_text(encoding="utf-8")).get("processor_class")
    if name is None:
        model_type = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).model_type
        name = PROCESSOR_MAPPING_NAMES.get(model_type)
    base = getattr(transformers, name, None) if name else None
    if base is None or "video_processor" not in base.get_attributes():
        return None

    def attributes(cls: Any) -> list[str]:
        return [attribute for attribute in base.get_attributes() if attribute != "video_processor"]

    return type(base.__name__, (base,), {"get_attributes": classmethod(attributes)})
