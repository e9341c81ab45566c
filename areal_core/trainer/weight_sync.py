"""New weights from the trained model to the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from areal_core.api.engine_api import InferenceEngine, TrainEngine
from areal_core.api.io_struct import WeightUpdateMeta

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.api.configs import TrainEngineConfig
    from areal_core.trainer.rollouts import Rollouts
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.world import World


class WeightSync:
    """Connects a train engine to the sampler on global rank 0, and sends it each version. Collective.

    Args:
        rollouts, engine, session: rank 0's; None on the others.
        config: the actor's.
        run_path: the run directory, for weights that go over the disk.
    """

    def __init__(
        self,
        world: World,
        actor: TrainEngine,
        rollouts: Rollouts | None,
        engine: InferenceEngine | None,
        session: RunSession | None,
        *,
        config: TrainEngineConfig,
        run_path: Path,
    ) -> None:
        self.actor, self.rollouts, self.session = actor, rollouts, session
        update = config.weight_update
        chosen = update.type
        if chosen == "auto" and engine is not None:
            in_process = type(engine).update_weights_from_memory is not InferenceEngine.update_weights_from_memory
            chosen = "memory" if in_process else "disk"
        self.meta = WeightUpdateMeta(
            type=world.agree(chosen), path=run_path / "weights" / "update", chunk_mb=update.weight_chunk_mb
        )
        actor.connect_engine(engine, self.meta)

    def send(self, version: int) -> None:
        """The actor's weights, as ``version``. Generation pauses meanwhile."""
        meta = attrs.evolve(self.meta, version=version)
        if self.rollouts is not None:
            self.rollouts.pause()
        self.actor.update_weights(meta)
        self.actor.set_version(version)
        if self.rollouts is not None:
            self.rollouts.resume(version)
            if self.session is not None:
                self.session.weights_updated(version, meta)
