"""Builds a transformers model from a Hugging Face folder, with errors that name the file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal_core.api.vision import is_vision_language
from areal_core.errors import BadInputError, ConfigError, did_you_mean
from areal_fsdp.attention import ATTENTION_NAME, register_attention
from areal_fsdp.vision import PACKED_TYPES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Layer types whose attention is fully said by "causal" and a window.
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention"}

#: What modules call the share of layers that they leave out in training.
_LAYER_DROP = {"layerdrop", "layer_drop"}


def resolve_folder(path: str, *, key: str = "path") -> Path:
    """The local folder of a model; a hub id is fetched.

    Raises:
        BadInputError: if there is neither.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith(".") or path.count("/") > 1 or folder.exists():
            raise BadInputError(f"{key}: {path} is not a folder. Give a folder in Hugging Face layout, or a hub id.")
        folder = _fetch(path, key)
    if not (folder / "config.json").is_file():
        raise BadInputError(f"{key}: {folder} has no config.json. Give a folder in Hugging Face layout.")
    return folder


def _fetch(path: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.py"]))
    except Exception as error:
        raise BadInputError(
            f"{key}: {path!r} is neither a folder nor a model that the hub gives out "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})."
        ) from error


def load_hf_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a folder."""
    from transformers import AutoConfig

    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInputError(f"{folder / 'config.json'}: not valid JSON ({error}).") from error
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        hint = " Set trust_remote_code to run the code it brings." if raw.get("auto_map") else ""
        raise BadInputError(
            f"{folder / 'config.json'}: transformers cannot use model type {raw.get('model_type')!r} "
            f"({_first_line(error)}).{hint}"
        ) from error


def check_weight_files(folder: Path) -> None:
    """Raise unless every safetensors shard is there and its header is sound."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: [k for k, f in weight_map.items() if f == name] for name in sorted(set(weight_map.values()))}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(f"{index}: not a valid index ({error!r}). It needs a 'weight_map'.") from error
    elif single.is_file():
        files = {single.name: []}
    else:
        raise BadInputError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json. Convert the weights to "
            "safetensors, or set init_from_scratch to start from random ones."
        )
    for name, tensors in files.items():
        shard = folder / name
        if not shard.is_file():
            raise BadInputError(f"{shard}: missing, but {index.name} lists it. Copy the whole model folder again.")
        try:
            with safe_open(shard, framework="pt") as handle:
                absent = sorted(set(tensors) - set(handle.keys()))
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{shard}: not a valid safetensors file ({error}). Copy the file again.") from error
        if absent:
            raise BadInputError(f"{shard}: lacks tensor {absent[0]!r}, which {index.name} places in it.")


def build_model(
    folder: Path,
    *,
    hf_config: Any,
    is_critic: bool,
    from_scratch: bool,
    param_dtype: torch.dtype,
    attn_impl: str,
    trust_remote_code: bool,
    meta: bool = False,
) -> nn.Module:
    """A transformers model on the CPU, in evaluation mode.

    Args:
        is_critic: with a scalar head ``score`` instead of the language-model head; it starts random where the folder
            has none.
        from_scratch: random weights by torch's global generator, nothing but ``config.json`` is read.
        attn_impl: ``auto`` for packed attention where the architecture allows it.
        meta: on the meta device instead, without weights; nothing but ``config.json`` is read.

    Raises:
        BadInputError: naming the file or the tensor.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    reads_images = is_vision_language(hf_config)
    auto: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    if is_critic and reads_images:
        raise BadInputError(
            f"{folder}: a scalar head on a vision-language model ({hf_config.model_type!r}) is not there yet. Use a "
            "text model as critic or reward model, or an algorithm without one."
        )
    if is_critic:
        auto = AutoModelForSequenceClassification
        hf_config.num_labels = 1
        if hf_config.pad_token_id is None:
            hf_config.pad_token_id = 0
    attention = _choose_attention(auto, hf_config, attn_impl, trust_remote_code)
    common: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    if reads_images and attention == ATTENTION_NAME:
        # The vision tower keeps images apart by itself.
        common["attn_implementation"] = {"": attention, "text_config": attention, "vision_config": "sdpa"}
    try:
        if from_scratch or meta:
            with _quiet_transformers(), torch.device("meta") if meta else nullcontext():
                model = auto.from_config(hf_config, dtype=param_dtype, **common)
        else:
            check_weight_files(folder)
            model = _load_weights(auto, folder, hf_config, param_dtype, common, is_critic)
    except (ValueError, ImportError, OSError, KeyError) as error:
        raise BadInputError(
            f"{folder}: transformers cannot build a {_kind(is_critic, reads_images)} model of type "
            f"{hf_config.model_type!r} with attention {attention!r} ({_first_line(error)})."
        ) from error
    model.config.use_cache = False
    if from_scratch or meta:
        _read_generation_config(model, folder)
    if is_critic and not hasattr(model, "score"):
        raise BadInputError(f"{folder}: the scalar-head model of type {hf_config.model_type!r} has no `score` layer.")
    return model.eval()


def _load_weights(
    auto: Any, folder: Path, hf_config: Any, dtype: torch.dtype, common: dict[str, Any], is_critic: bool
) -> nn.Module:
    from safetensors import SafetensorError

    try:
        with _quiet_transformers():
            model, info = auto.from_pretrained(
                folder,
                config=hf_config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **common,
            )
    except SafetensorError as error:
        raise BadInputError(f"{folder}: cannot read the safetensors ({error}).") from error
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    if mismatched:
        raise BadInputError(
            f"{folder}: tensor {mismatched[0]!r} does not have the shape that config.json asks for"
            f"{f' (nor have {len(mismatched) - 1} others)' if len(mismatched) > 1 else ''}."
        )
    missing = sorted(k for k in info["missing_keys"] if not (is_critic and k.startswith("score.")))
    if missing:
        raise BadInputError(
            f"{folder}: {len(missing)} tensors are missing from the safetensors, the first is {missing[0]!r}. "
            "The weights do not belong to this config.json."
        )
    check_unexpected(model, folder, sorted(info["unexpected_keys"]))
    return model


def check_unexpected(model: Any, where: Path, keys: list[str]) -> None:
    """Raise if files hold tensors that belong to another model.

    Raises:
        BadInputError: naming the first of them.
    """
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
    # A scalar head takes the place of the language-model head; frequencies are computed, though old files hold them.
    strange = [
        key
        for key in keys
        if not (key.startswith("lm_head.") or key.endswith("inv_freq") or any(p.search(key) for p in ignored))
    ]
    if strange:
        raise BadInputError(
            f"{where}: {len(strange)} tensors have no place in a {type(model).__name__}, the first is {strange[0]!r}. "
            "The weights do not belong to this config.json."
        )


def _choose_attention(auto: Any, hf_config: Any, attn_impl: str, trust_remote_code: bool) -> str | None:
    """The name of packed attention if the architecture works with it, else what transformers would choose."""
    register_attention()
    if attn_impl not in ("auto", ATTENTION_NAME):
        _check_attention(attn_impl)
        return attn_impl
    try:
        model_class = auto._model_mapping[type(hf_config)]
    except KeyError:  # code that comes with the folder, or no such head: transformers decides, or says why not
        return None
    layer_types = set(getattr(hf_config.get_text_config(), "layer_types", None) or [])
    supported = getattr(model_class, "_supports_attention_backend", False) and layer_types <= _PLAIN_LAYERS
    if is_vision_language(hf_config):
        supported = supported and hf_config.model_type in PACKED_TYPES
    return ATTENTION_NAME if supported else None


def _check_attention(attn_impl: str) -> None:
    """Raise unless transformers knows the name; one with a slash is that of a kernel on the hub."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name and name != ATTENTION_NAME]
    known = ["auto", "eager", *registered]
    if attn_impl not in known and "/" not in attn_impl:
        raise ConfigError(
            f"there is no attention {attn_impl!r}; known are {', '.join(known)}.{did_you_mean(attn_impl, known)}",
            key="attn_impl",
        )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0, also where a module holds its rate as a number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name in _LAYER_DROP):
                setattr(module, name, 0.0)


def _kind(is_critic: bool, reads_images: bool) -> str:
    if is_critic:
        return "scalar-head"
    return "vision-language" if reads_images else "causal language"


def _read_generation_config(model: nn.Module, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no report of missing keys: the caller checks them."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
