"""Optimizer, learning-rate schedule, and what both need to be saved."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec
from areal_core.errors import BadInputError


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW (fused) or SGD over the parameters that require gradients; vectors (biases, norms) do not decay."""
    trained = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise BadInputError("optimizer: the model has no parameter that is trained.")
    if config.type == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    raise BadInputError(f"optimizer.type: {config.type!r} is not there yet in the fsdp engine. Use 'adamw' or 'sgd'.")


class Schedule:
    """Linear warm-up, then constant, linear or cosine down to a floor; counted in training steps.

    The step with index ``k`` (from 0) runs at ``lr * (k + 1) / warmup`` during the warm-up. After it, with ``p`` the
    share of the remaining steps that is over, at the floor plus ``1 - p`` (linear) or ``(1 + cos(pi p)) / 2``
    (cosine) of what is above the floor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, ft_spec: FinetuneSpec | None) -> None:
        needs_total = config.lr_scheduler_type != "constant" or (
            config.warmup_steps == 0 and config.warmup_steps_proportion > 0
        )
        if needs_total and ft_spec is None:
            raise BadInputError(
                f"optimizer.lr_scheduler_type: {config.lr_scheduler_type!r} needs the number of training steps; "
                "initialize the engine with a FinetuneSpec."
            )
        self.optimizer, self.config = optimizer, config
        self.total = ft_spec.total_steps if ft_spec is not None else 0
        self.warmup = config.warmup_steps or round(config.warmup_steps_proportion * self.total)
        self.step_index = 0
        self._apply()

    @property
    def lr(self) -> float:
        return self.config.lr * self.factor(self.step_index)

    def factor(self, index: int) -> float:
        if index < self.warmup:
            return (index + 1) / self.warmup
        if self.config.lr_scheduler_type == "constant":
            return 1.0
        share = min(1.0, (index - self.warmup) / max(1, self.total - self.warmup))
        floor = self.config.min_lr_ratio
        if self.config.lr_scheduler_type == "linear":
            return floor + (1 - floor) * (1 - share)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    def step(self) -> None:
        self.step_index += 1
        self._apply()

    def load(self, step_index: int) -> None:
        self.step_index = step_index
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the (zero) state that its first step would create, so that there is something to load into."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
