"""`areal eval`: score a model on the held-out split of a configuration, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from areal_core.api.configs import RLConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.errors import BadInputError, ConfigError
from areal_core.stats import StatsTracker
from areal_core.trainer.loading import build_inference_engine, load_tokenizer
from areal_core.trainer.rollouts import Rollouts
from areal_core.trainer.run import prepare_process
from areal_core.trainer.signals import Interrupted, StopSignal

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig
    from areal_core.plugins.manager import PluginManager


def evaluate(config: BaseTrainerConfig, manager: PluginManager, *, weights: str | None = None) -> dict[str, float]:
    """Metrics of the model at ``weights`` (default: ``actor.path``) on ``valid_dataset``.

    Raises:
        BadInputError: if the configuration has no held-out split, or there is no model.
        Interrupted: on SIGINT or SIGTERM.
    """
    if not isinstance(config, RLConfig | DistillConfig):
        raise ConfigError(
            f"`areal eval` scores completions; it needs `rl` or `distill`, not {config.trainer!r}.",  # type: ignore[attr-defined]
            key="trainer",
        )
    if config.valid_dataset is None:
        raise ConfigError("is missing: `areal eval` needs a held-out split.", key="valid_dataset")
    if weights is not None:
        config = attrs.evolve(config, actor=attrs.evolve(config.actor, path=weights))  # type: ignore[arg-type]
    if config.actor.init_from_scratch and weights is None:
        raise BadInputError(
            "actor.path holds no weights (actor.init_from_scratch is true). Name some: areal eval CONFIG --weights DIR"
        )
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
