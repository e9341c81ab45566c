"""The loop that every trainer runs in: restore, step, evaluate, save, log, stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.trainer.signals import Interrupted, StopSignal

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig
    from areal_core.api.engine_api import TrainEngine
    from areal_core.stats import StatsTracker
    from areal_core.trainer.checkpoint import Checkpointer
    from areal_core.trainer.residency import Residency
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.world import World


class Trainer(Protocol):
    """What the loop drives. Every method is called by every rank."""

    tokenizer: Any
    total_steps: int
    stats: StatsTracker
    residency: Residency
    #: The held-out metric that ranks weights unless the configuration names another.
    metric: str

    @property
    def engines(self) -> Mapping[str, TrainEngine]: ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; the engines have loaded theirs."""

    def start(self) -> None:
        """Everything is loaded or restored; the first step follows."""

    def train_step(self, step: int) -> bool:
        """One step, its metrics in ``stats``. False if it was interrupted before anything changed."""

    def evaluate(self, step: int) -> bool:
        """Held-out metrics (``eval/...``) in ``stats``. False if it was interrupted."""

    def state(self) -> dict[str, Any]:
        """Rank 0: what ``load_state`` needs, as of the last finished step."""

    def close(self) -> None: ...


def run_loop(
    trainer: Trainer,
    config: BaseTrainerConfig,
    world: World,
    session: RunSession | None,
    checkpointer: Checkpointer,
    stop: StopSignal,
) -> dict[str, float]:
    """Train to the last step.

    Returns:
        the metrics of the last step.

    Raises:
        Interrupted: after SIGINT or SIGTERM, when the state of the last finished step is saved.
    """
    restored = checkpointer.restore()
    start = 0
    if restored is not None:
        start = int(restored["step"])
        with checkpointer.reading():
            trainer.load_state(restored)
        if session is not None:
            # The evaluation of the start is done again, too.
            session.directory.truncate(-1 if start == 0 and config.evaluation.at_start else start)
    trainer.start()
    if session is not None:
        session.start_progress(trainer.total_steps)

    def evaluate(step: int) -> bool:
        with trainer.stats.time("eval"):
            return trainer.evaluate(step)

    def interrupt(step: int) -> Interrupted:
        checkpointer.save(step, trainer.state() if world.is_main else {})
        checkpointer.finish()
        return Interrupted(int(world.agree(stop.signum)))

    metrics: dict[str, float] = {}
    if start == 0 and config.evaluation.at_start:
        if not evaluate(0):
            raise interrupt(0)
        metrics = trainer.stats.export()
        if session is not None:
            session.log_step(0, metrics)
        checkpointer.keep_if_best(0, metrics, trainer.engines["actor"])

    for step in range(start + 1, trainer.total_steps + 1):
        if not trainer.train_step(step):
            raise interrupt(step - 1)
        last = step == trainer.total_steps
        freq = config.evaluation.freq_steps
        # An interrupted evaluation loses its own metrics, not the step's.
        if (freq is not None and step % freq == 0) or (last and config.evaluation.at_end):
            evaluate(step)
        metrics = trainer.stats.export()
        # Line first, checkpoint second: a kill between the two loses a step that is then done again, never a line.
        if session is not None:
            session.log_step(step, metrics)
        checkpointer.keep_if_best(step, metrics, trainer.engines["actor"])
        decision = world.agree({"save": checkpointer.due(step), "stop": stop()} if world.is_main else None)
        if decision["stop"] and not last:
            raise interrupt(step)
        checkpointer.poll()
        if decision["save"] or last:
            checkpointer.save(step, trainer.state() if world.is_main else {})
    checkpointer.finish()
    if config.checkpoint.save_final:
        checkpointer.export("final", trainer.engines["actor"])
    return metrics
