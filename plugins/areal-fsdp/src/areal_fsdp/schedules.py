"""The learning-rate schedule, as a factor of the peak rate."""

from __future__ import annotations

import math

import torch

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec
from areal_core.errors import ConfigError


class Schedule:
    """Linear warm-up, then a shape down to a floor; counted in training steps.

    With ``T`` steps, ``W`` of them warm-up, and the floor ``f`` (``min_lr_ratio``), the step with index ``k`` (from 0)
    runs at ``lr`` times

    * ``(k + 1) / W`` during the warm-up, ``k < W``;
    * ``1`` (``constant``);
    * ``f + (1 - f) (1 - p)`` (``linear``) or ``f + (1 - f) (1 + cos(pi p)) / 2`` (``cosine``, Loshchilov and Hutter,
      arXiv:1608.03983, eq. 5), where ``p = (k - W) / (T - W)``, at most 1;
    * ``wsd`` (warm-up, stable, decay; Hu et al., arXiv:2404.06395, section 4.2, here with a linear decay): ``1``, and
      over the last ``D = decay_steps_proportion * T`` steps ``f + (1 - f) (1 - q)`` with ``q = (k + 1 - (T - D)) / D``,
      so that the last step runs at the floor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, ft_spec: FinetuneSpec | None) -> None:
        needs_total = config.lr_scheduler_type != "constant" or (
            config.warmup_steps == 0 and config.warmup_steps_proportion > 0
        )
        if needs_total and ft_spec is None:
            raise ConfigError(
                f"{config.lr_scheduler_type!r} needs the number of training steps; "
                "initialize the engine with a FinetuneSpec.",
                key="optimizer.lr_scheduler_type",
            )
        self.optimizer, self.config = optimizer, config
        self.total = ft_spec.total_steps if ft_spec is not None else 0
        self.warmup = config.warmup_steps or round(config.warmup_steps_proportion * self.total)
        # Together they may ask for more steps than there are: the warm-up comes first.
        self.decay = min(round(config.decay_steps_proportion * self.total), max(0, self.total - self.warmup))
        self.step_index = 0
        self._apply()

    @property
    def lr(self) -> float:
        return self.config.lr * self.factor(self.step_index)

    def factor(self, index: int) -> float:
        """What the peak learning rate is multiplied with in the step of this index (from 0)."""
        if index < self.warmup:
            return (index + 1) / self.warmup
        shape, floor = self.config.lr_scheduler_type, self.config.min_lr_ratio
        if shape == "constant":
            return 1.0
        if shape == "wsd":
            over = index + 1 - (self.total - self.decay)
            return 1.0 if over <= 0 or self.decay == 0 else floor + (1 - floor) * (1 - min(1.0, over / self.decay))
        share = min(1.0, (index - self.warmup) / max(1, self.total - self.warmup))
        if shape == "linear":
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
