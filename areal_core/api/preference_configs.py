"""The configurations of the trainers on preference pairs: `rw` and `dpo`."""

from __future__ import annotations

from typing import Literal

import attrs

from areal_core.api.configs import BaseTrainerConfig, DatasetConfig, TrainEngineConfig
from areal_core.config.fields import option


@attrs.define(kw_only=True)
class RWConfig(BaseTrainerConfig):
    """`trainer: rw`: a reward model from preference pairs (Bradley-Terry)."""

    trainer: Literal["rw"] = option("rw", "This trainer.")
    actor: TrainEngineConfig = option(help="The model; a scalar head takes the place of its language-model head.")
    train_dataset: DatasetConfig = option(help="Pairs: `chosen` and `rejected`.")
    valid_dataset: DatasetConfig | None = option(None, "Held-out pairs.")
    center_coef: float = option(0.0, "Weight of (score chosen + score rejected)^2, which centres the scores.", ge=0)


@attrs.define(kw_only=True)
class DPOConfig(BaseTrainerConfig):
    """`trainer: dpo`: a policy from preference pairs, without a reward model."""

    trainer: Literal["dpo"] = option("dpo", "This trainer.")
    actor: TrainEngineConfig = option(help="The policy.")
    train_dataset: DatasetConfig = option(help="Pairs: `chosen` and `rejected`.")
    ref: TrainEngineConfig | None = option(
        None, "Reference model; with `actor.lora` it may be left out: the reference is the actor without its adapters."
    )
    valid_dataset: DatasetConfig | None = option(None, "Held-out pairs.")
    loss: Literal["sigmoid", "ipo"] = option("sigmoid", "sigmoid: DPO; ipo: a squared loss that does not saturate.")
    beta: float = option(0.1, "Strength of the pull to the reference (IPO: tau).", gt=0)
    label_smoothing: float = option(0.0, "Share of pairs whose label is taken to be wrong (sigmoid).", ge=0, lt=0.5)
