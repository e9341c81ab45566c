"""Which tokens end a completion, as the model's folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_core.logging import getLogger

logger = getLogger("VLLMEngine")


def as_ids(value: Any) -> list[int]:
    """Token ids of a config's ``eos_token_id``: None, one, or a list."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]


def model_eos_ids(model_path: str, *, trust_remote_code: bool = False) -> list[int]:
    """The ids in ``generation_config.json``, or else in ``config.json``; empty where neither can be read.

    A server started with ``--generation-config vllm`` knows the tokenizer's alone.
    """
    folder = Path(model_path)
    if folder.is_dir():
        for name in ("generation_config.json", "config.json"):
            ids = as_ids(_read(folder / name).get("eos_token_id"))
            if ids:
                return ids
        return []
    from transformers import AutoConfig, GenerationConfig

    try:
        return as_ids(GenerationConfig.from_pretrained(model_path).eos_token_id)
    except (OSError, ValueError):
        pass
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        logger.warning("no config of the model at %s here: completions end at the tokenizer's EOS alone", model_path)
        return []
    return as_ids(getattr(config, "eos_token_id", None))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
