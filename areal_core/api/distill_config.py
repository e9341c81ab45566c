"""The configuration of the `distill` trainer."""

from __future__ import annotations

from typing import Literal

import attrs

from areal_core.api.configs import (
    BaseTrainerConfig,
    DatasetConfig,
    InferenceEngineConfig,
    RewardConfig,
    TrainEngineConfig,
    WorkflowConfig,
)
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.config.fields import option
from areal_core.errors import ConfigError


@attrs.define(kw_only=True)
class DistillConfig(BaseTrainerConfig):
    """`trainer: distill`: a student learns a teacher's distribution on what the student itself writes."""

    trainer: Literal["distill"] = option("distill", "This trainer.")
    actor: TrainEngineConfig = option(help="The student.")
    teacher: TrainEngineConfig = option(help="The teacher, with the same vocabulary; on the actor's mesh.")
    train_dataset: DatasetConfig = option(help="Prompts to train on.")
    valid_dataset: DatasetConfig | None = option(None, "Held-out prompts (the divergence is measured).")
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = option(
        "reverse_kl", "What is minimised: KL(student || teacher), KL(teacher || student), or a mixture of both."
    )
    jsd_beta: float = option(0.5, "jsd: weight of the teacher in the mixture.", gt=0, lt=1)
    rollout: InferenceEngineConfig = option(factory=InferenceEngineConfig, help="Generation.")
    gconfig: GenerationHyperparameters = option(factory=GenerationHyperparameters, help="Sampling.")
    workflow: WorkflowConfig = option(factory=WorkflowConfig, help="What one episode is.")
    reward: RewardConfig | None = option(None, "Scores completions, only to be reported; without it all score 0.")
    rewards: dict[str, RewardConfig] = option(
        factory=dict, help="Several rewards by a label of your choice; only reported.", labels=True
    )
    eval_gconfig: GenerationHyperparameters | None = option(None, "Sampling in evaluation; None: greedy, one sample.")

    @property
    def reward_sections(self) -> dict[str, RewardConfig]:
        """The rewards by the key of their section: ``reward`` alone, or ``rewards.LABEL`` for each; empty for none.

        Raises:
            ConfigError: if both are given.
        """
        if self.reward is not None and self.rewards:
            raise ConfigError("both `reward` and `rewards` are given. Give one.", key="rewards")
        if self.reward is not None:
            return {"reward": self.reward}
        return {f"rewards.{label}": section for label, section in self.rewards.items()}
