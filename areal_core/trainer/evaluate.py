"""`areal eval`: score a model on the held-out split of a configuration, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from areal_core.api.configs import RLConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.api.preference_configs import DPOConfig
from areal_core.errors import BadInputError, ConfigError
from areal_core.stats import StatsTracker
from areal_core.trainer.loading import build_inference_engine, load_tokenizer
from areal_core.trainer.rollouts import Rollouts
from areal_core.trainer.run import build_trainer, prepare_process
from areal_core.trainer.signals import Interrupted, StopSignal
from areal_core.trainer.world import World

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig
    from areal_core.plugins.manager import PluginManager


def evaluate(config: BaseTrainerConfig, manager: PluginManager, *, weights: str | None = None) -> dict[str, float]:
    """Metrics of the model at ``weights`` (default: ``actor.path``) on ``valid_dataset``.

    With the trainers `rl` and `distill` the model writes completions, which are rewarded; with the others it is the
    loss and what goes with it. In this process alone, whatever the mesh of the run.

    Raises:
        BadInputError: if the configuration has no held-out split, or there is no model.
        Interrupted: on SIGINT or SIGTERM.
    """
    run: Any = config
    if run.valid_dataset is None:
        raise ConfigError("is missing: `areal eval` needs a held-out split.", key="valid_dataset")
    if run.actor.init_from_scratch and weights is None:
        raise BadInputError(
            "actor.path holds no weights (actor.init_from_scratch is true). Name some: areal eval CONFIG --weights DIR"
        )
    if not isinstance(config, RLConfig | DistillConfig):
        return _evaluate_losses(run, manager, weights)
    if weights is not None:
        config = attrs.evolve(config, actor=attrs.evolve(config.actor, path=weights))  # type: ignore[arg-type]
    prepare_process(config)
    tokenizer = load_tokenizer(
        config.tokenizer_path or config.actor.path, trust_remote_code=config.actor.trust_remote_code
    )
    stats = StatsTracker()
    with StopSignal() as stop:
        engine = build_inference_engine(config.rollout, config.actor.dtype, manager)
        rollouts = Rollouts(config, engine, tokenizer, None, manager, None, stop)
        try:
            rollouts.start()
            with stats.time("eval"):
                done = rollouts.evaluate(0, stats)
        finally:
            rollouts.close()
    if not done:
        raise Interrupted(int(stop.signum or 0))
    return stats.export()


def _evaluate_losses(config: Any, manager: PluginManager, weights: str | None) -> dict[str, float]:
    actor = attrs.evolve(config.actor, backend=config.actor.parsed_backend.name)
    changes: dict[str, Any] = {}
    if isinstance(config, DPOConfig):
        # A run with adapters has no section ref: its reference is the model that they were added to.
        ref = config.ref or attrs.evolve(actor, optimizer=None, lora=None)
        changes["ref"] = attrs.evolve(ref, backend=ref.parsed_backend.name)
    if weights is not None:
        actor = attrs.evolve(actor, path=weights, init_from_scratch=False, lora=None)
    config = attrs.evolve(config, actor=actor, **changes)
    prepare_process(config)
    with StopSignal() as stop:
        trainer = build_trainer(config, World(0, 1, None), manager, None, stop)
        try:
            with trainer.stats.time("eval"):
                done = trainer.evaluate(0)
        finally:
            trainer.close()
    if not done:
        raise Interrupted(int(stop.signum or 0))
    return trainer.stats.export()
