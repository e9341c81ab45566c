"""Low-rank adapters by peft, injected into the transformers model in place."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal_core.api.configs import LoRAConfig
from areal_core.errors import ConfigError

_ADAPTER = "default"


def add_lora(model: nn.Module, config: LoRAConfig) -> Any:
    """Inject adapters into ``model``; its other parameters freeze. Returns the ``PeftModel`` around it.

    Raises:
        BadInputError: if the target modules are not there, or are not linear layers.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    targets: Any = config.target_modules
    if targets == ["all-linear"]:
        targets = "all-linear"
    options = LoraConfig(
        r=config.rank,
        # peft takes a number that is not whole too, but servers write whole ones.
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        modules_to_save=config.modules_to_save or None,
        bias="none",
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers for this by an old name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            wrapped = get_peft_model(model, options, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"peft cannot use {config.target_modules} ({str(error).splitlines()[0]}). "
            f"Linear layers of this model: {', '.join(names)}.",
            key="lora.target_modules",
        ) from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not module.lora_A:
            raise ConfigError(f"{name} is not a linear layer; only those are supported.", key="lora.target_modules")
    _check_ties(model)
    return wrapped


def _check_ties(model: Any) -> None:
    """Reject what changes one end of a tie: a checkpoint and an inference engine have one tensor for both ends.

    Raises:
        BadInputError: naming the module.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if not tied or model.get_output_embeddings() is None:
        return
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if id(module) in ends and isinstance(module, (LoraLayer, ModulesToSaveWrapper)):
            key = "target_modules" if isinstance(module, LoraLayer) else "modules_to_save"
            raise ConfigError(
                f"{name} shares its weight with the other end of the model (tie_word_embeddings), which "
                "adapters cannot train. Leave it out, or train all weights (no `lora`).",
                key=f"lora.{key}",
            )


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """``module name -> LoraLayer``."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merged_weight(layer: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``W + scaling * B A`` as peft's merge computes it; full tensors in, a new tensor out."""
    delta = (b @ a) * layer.scaling[_ADAPTER]
    return weight + (delta.T if layer.fan_in_fan_out else delta).to(weight.dtype)


def write_adapter(wrapped: Any, state: dict[str, torch.Tensor], path: Path, *, base: Path, is_critic: bool) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``, as peft, vLLM and SGLang read them.

    Args:
        state: full tensors of the trained parameters, by their name in the ``PeftModel``.
        base: the model that the adapter belongs to.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    adapter = get_peft_model_state_dict(wrapped, state_dict=state, save_embedding_layers=False)
    save_file({k: v.contiguous() for k, v in adapter.items()}, path / "adapter_model.safetensors")
    config = copy.copy(wrapped.peft_config[_ADAPTER])
    # Given to peft from the start, a task would make it train a scalar head beside the adapter.
    config.task_type = "SEQ_CLS" if is_critic else "CAUSAL_LM"
    config.base_model_name_or_path = str(base)
    config.inference_mode = True
    config.save_pretrained(path)
    # safetensors writes files that only their owner can read.
    shutil.copymode(path / "adapter_config.json", path / "adapter_model.safetensors")
