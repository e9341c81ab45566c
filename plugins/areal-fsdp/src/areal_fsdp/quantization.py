"""torchao: frozen models with 8-bit weights, and training whose matrix products are float8."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch
from torch import nn

from areal_core.api.configs import TrainEngineConfig
from areal_core.errors import BadInputError, ConfigError
from areal_fsdp.config import FSDPConfig
from areal_fsdp.mesh import Mesh

Float8 = Literal["none", "tensorwise", "rowwise", "emulated"]

#: torchao's kernels need both dimensions of a weight to be multiples of this.
_MULTIPLE = 16
#: Compute capability of the first GPUs that multiply float8 (Ada, Hopper), and of those that scale rows.
_CAPABILITIES: dict[str, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def check_quantization(config: TrainEngineConfig, options: FSDPConfig, mesh: Mesh, *, key: str) -> None:
    """Raise if the options cannot work here. Nothing is loaded for it.

    Raises:
        BadInputError: naming the key.
    """
    if config.quantization is not None:
        where = f"{key}.quantization"
        if config.optimizer is not None:
            raise BadInputError(
                f"{where}: {config.quantization} weights cannot be trained. Use it for a model without `optimizer`, "
                "such as ref."
            )
        if config.lora is not None:
            raise BadInputError(f"{where}: cannot be combined with lora. Leave one of them out.")
        if mesh.tp_size > 1:
            raise BadInputError(f"{where}: cannot be split over t{mesh.tp_size} ranks. Use data parallelism only.")
        _need_torchao(where)
    if options.float8 == "none":
        return
    where = f"{key}.fsdp.float8"
    if config.optimizer is None:
        raise BadInputError(f"{where}: is for a model that is trained. For a frozen one use `quantization`.")
    if config.lora is not None:
        raise BadInputError(f"{where}: cannot be combined with lora. Leave one of them out.")
    if mesh.tp_size > 1:
        raise BadInputError(f"{where}: cannot be combined with t{mesh.tp_size}. Use data parallelism only.")
    _need_torchao(where)
    needed = _CAPABILITIES.get(options.float8)
    if needed is None:
        return
    found = torch.cuda.get_device_capability(mesh.device) if mesh.device.type == "cuda" else None
    if found is None or found < needed:
        has = "there is no GPU" if found is None else f"this one has {found[0]}.{found[1]}"
        raise BadInputError(
            f"{where}: {options.float8} needs a GPU of compute capability {needed[0]}.{needed[1]} or later, and {has}. "
            "Use none (bfloat16); emulated shows the numerics on any device, slowly."
        )


def quantize_weights(model: nn.Module, kind: Literal["int8_weight_only", "float8_weight_only"]) -> None:
    """Store the weights of hidden linear layers in 8 bits, with a scale for each row; the head stays as it is.

    Products are computed in the type of the activations, from weights that are scaled back on the way.
    """
    _quiet_torchao()
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if kind == "int8_weight_only" else Float8WeightOnlyConfig()
    ends = _ends(model)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and id(module) not in ends)


def use_float8(model: nn.Module, recipe: Float8) -> None:
    """Compute the products of hidden linear layers in float8, forward and backward; parameters keep their type.

    Source: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433, with torchao's dynamic scaling.
    """
    _quiet_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if recipe == "emulated":
        config = Float8LinearConfig(emulate=True)
    else:
        config = Float8LinearConfig.from_recipe_name(recipe)
    ends = _ends(model)

    def chosen(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or id(module) in ends:
            return False
        return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0

    if not any(chosen(module, name) for name, module in model.named_modules()):
        raise ConfigError(
            f"no hidden linear layer of this model has sizes that are multiples of {_MULTIPLE}. Use none.",
            key="fsdp.float8",
        )
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _ends(model: Any) -> set[int]:
    """The head, and a critic's: small errors there are errors of the log-probs."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    return {id(head) for head in heads if head is not None}


def _need_torchao(where: str) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise BadInputError(f"{where}: needs torchao, which is not installed: pip install 'areal-fsdp[torchao]'.")


def _quiet_torchao() -> None:
    """It warns of every compiled kernel that does not fit this machine; none of them is used here."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
