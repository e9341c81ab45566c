"""Builds the optimizer, counts skipped steps, and prepares states that a checkpoint is loaded into."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from areal_core.api.configs import OptimizerConfig
from areal_core.errors import ArealError, ConfigError
from areal_fsdp.low_precision import LowPrecisionAdamW
from areal_fsdp.muon import Muon
from areal_fsdp.schedules import Schedule

__all__ = ["Schedule", "SkipGuard", "build_optimizer", "ensure_state"]

_MUON_MOMENTUM = 0.95
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the parameters of a transformers model that require gradients.

    Vectors (biases, norms) do not decay. With ``muon`` the matrices of hidden layers are orthogonalised; embeddings,
    the head, vectors and stacks of experts are AdamW's.

    Raises:
        BadInputError: if nothing is trained, or options do not fit together.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that is trained.", key="optimizer")
    if config.momentum is not None and config.type == "adamw":
        raise ConfigError("is an option of sgd and muon. That of adamw is beta1.", key="optimizer.momentum")
    betas = (config.beta1, config.beta2)
    low_precision = _check_precision(config, trained)
    if config.type == "muon":
        ends = _ends(model)
        groups = _groups(trained, config.weight_decay, muon=lambda p: p.ndim == 2 and id(p) not in ends)
        momentum = _MUON_MOMENTUM if config.momentum is None else config.momentum
        return Muon(groups, lr=config.lr, momentum=momentum, betas=betas, eps=config.eps)
    groups = _groups(trained, config.weight_decay)
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum or 0.0)
    if low_precision:
        return LowPrecisionAdamW(
            groups,
            lr=config.lr,
            betas=betas,
            eps=config.eps,
            state_dtype=_DTYPES[config.state_dtype] if config.state_dtype is not None else None,
            rounding=config.rounding,
        )
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def _groups(
    trained: list[nn.Parameter], weight_decay: float, *, muon: Callable[[nn.Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Parameters that are treated alike. Those on other meshes stand apart: fused updates take only one kind."""
    groups: dict[Hashable, dict[str, Any]] = {}
    for parameter in trained:
        decays = parameter.ndim >= 2
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        is_muon = muon is not None and muon(parameter)
        key = (decays, mesh, is_muon)
        options = {"params": [], "weight_decay": weight_decay if decays else 0.0}
        if muon is not None:
            options["muon"] = is_muon
        groups.setdefault(key, options)["params"].append(parameter)
    return list(groups.values())


def _ends(model: Any) -> set[int]:
    """Ids of the parameters of embeddings (of tokens and positions) and of the head."""
    ends = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for module in (model.get_output_embeddings(), getattr(model, "score", None)):
        if module is not None:
            ends |= {id(p) for p in module.parameters()}
    return ends


def _check_precision(config: OptimizerConfig, parameters: list[nn.Parameter]) -> bool:
    """Whether states or rounding need the low-precision AdamW."""
    if config.state_dtype is None and config.rounding == "none":
        return False
    key = "state_dtype" if config.state_dtype is not None else "rounding"
    if config.type != "adamw":
        raise ConfigError(f"is an option of type adamw, not of {config.type}.", key=f"optimizer.{key}")
    has_bf16 = any(p.dtype == torch.bfloat16 for p in parameters)
    if config.rounding == "kahan" and not has_bf16:
        raise ConfigError(
            "kahan compensates bfloat16 parameters. Set param_dtype to bfloat16.", key="optimizer.rounding"
        )
    if config.rounding == "stochastic" and not has_bf16 and config.state_dtype != "bfloat16":
        raise ConfigError(
            "nothing is bfloat16. Set param_dtype or optimizer.state_dtype to bfloat16.", key="optimizer.rounding"
        )
    return True


class SkipGuard:
    """Counts steps in a row whose gradient was not finite, and ends a run that does nothing else."""

    def __init__(self, max_skipped: int | None) -> None:
        self.max_skipped = max_skipped
        self.in_a_row = 0

    def count(self, grad_norm: float) -> None:
        """Called once for each step that had something to learn, with the same norm on every rank.

        Raises:
            ArealError: after ``max_skipped`` steps in a row.
        """
        self.in_a_row = 0 if math.isfinite(grad_norm) else self.in_a_row + 1
        if self.max_skipped is not None and self.in_a_row >= self.max_skipped:
            raise ArealError(
                f"optimizer.max_skipped: the gradient was not finite in {self.in_a_row} steps in a row (its norm "
                f"is {grad_norm}), and all of them were skipped. The weights are still finite. Lower optimizer.lr, "
                "compute in float32 (dtype), or look for infinite rewards or advantages."
            )


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the (zero) state of before its first step, so that there is something to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if isinstance(optimizer, (Muon, LowPrecisionAdamW)):
                optimizer.init_state(parameter)
            elif isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
            elif isinstance(optimizer, torch.optim.SGD) and group["momentum"] > 0:
                # Of zeros the first step makes the gradient itself, as it does of no buffer.
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
