"""One run from its configuration: open the directory, train, close it well."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from areal_core.errors import BadInputError
from areal_core.logging import getLogger, setup_logging
from areal_core.plugins.manager import get_plugin_manager
from areal_core.trainer.checkpoint import Checkpointer
from areal_core.trainer.checks import check_config
from areal_core.trainer.loop import Trainer, run_loop
from areal_core.trainer.session import RunSession
from areal_core.trainer.signals import Interrupted, StopSignal
from areal_core.trainer.world import World

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig
    from areal_core.plugins.manager import PluginManager

logger = getLogger("Trainer")

Resume = Literal["auto", "never", "must"]


@attrs.frozen
class RunResult:
    """How a run ended.

    Attributes:
        status: ``finished`` or ``interrupted``.
        path: the run directory.
        metrics: of the last step.
        signum: the signal that interrupted it.
    """

    status: Literal["finished", "interrupted"]
    path: Path
    metrics: dict[str, float] = attrs.field(factory=dict)
    signum: int | None = None


def train(config: BaseTrainerConfig, *, resume: Resume = "never", manager: PluginManager | None = None) -> RunResult:
    """Train as ``config`` says. Called by every rank.

    Raises:
        BadInputError: if the configuration, data or run directory cannot be used.
        ArealError: if the run failed.
    """
    from areal_core.config.plain import to_plain
    from areal_core.runs.run_dir import RunDirectory

    manager = manager or get_plugin_manager()
    world = World.from_environment()
    plain = to_plain(config)
    directory: RunDirectory | None = None
    session: RunSession | None = None
    # Before anything is written: a mistake in the configuration leaves no directory of a run behind.
    check_config(config, world.size, manager)
    with StopSignal() as stop:
        if world.is_main:
            directory = RunDirectory.open(plain, config.run.path, resume=resume)
        # Nobody logs into a directory that rank 0 refused.
        world.barrier()
        setup_logging(
            log_file=config.run.path / "logs" / f"rank-{world.rank}.log", rank=world.rank, world_size=world.size
        )
        if directory is not None:
            latest = directory.latest_checkpoint
            resumed_from = 0 if latest is None else latest[0]
            session = RunSession(config, plain, directory, manager, resumed_from=resumed_from)
        trainer: Trainer | None = None
        checkpointer: Checkpointer | None = None
        try:
            prepare_process(config)
            trainer = build_trainer(config, world, manager, session, stop)
            checkpointer = Checkpointer(
                config.checkpoint,
                config.run.path,
                world,
                session,
                trainer.engines,
                trainer.tokenizer,
                default_metric=trainer.metric,
                residency=trainer.residency,
            )
            metrics = run_loop(trainer, config, world, session, checkpointer, stop)
            _close(trainer, session, "finished")
            return RunResult("finished", config.run.path, metrics)
        except Interrupted as interrupted:
            _close(trainer, session, "interrupted")
            return RunResult("interrupted", config.run.path, signum=interrupted.signum)
        except BaseException as error:
            if checkpointer is not None:
                checkpointer.close()
            _close(trainer, session, "failed", error)
            raise


def build_trainer(
    config: BaseTrainerConfig, world: World, manager: PluginManager, session: RunSession | None, stop: StopSignal
) -> Trainer:
    """The trainer that a configuration is of, with its models loaded."""
    from areal_core.api.configs import RLConfig, SFTConfig
    from areal_core.api.distill_config import DistillConfig
    from areal_core.api.preference_configs import DPOConfig, RWConfig

    if isinstance(config, RLConfig):
        from areal_core.trainer.rl import RLTrainer

        return RLTrainer(config, world, manager, session, stop)
    if isinstance(config, SFTConfig):
        from areal_core.trainer.sft import SFTTrainer

        return SFTTrainer(config, world, manager, session, stop)
    if isinstance(config, RWConfig):
        from areal_core.trainer.rw import RWTrainer

        return RWTrainer(config, world, manager, session, stop)
    if isinstance(config, DPOConfig):
        from areal_core.trainer.dpo import DPOTrainer

        return DPOTrainer(config, world, manager, session, stop)
    if isinstance(config, DistillConfig):
        from areal_core.trainer.distill import DistillTrainer

        return DistillTrainer(config, world, manager, session, stop)
    raise BadInputError(f"trainer: no trainer for a {type(config).__name__}")


def _close(
    trainer: Trainer | None, session: RunSession | None, status: str, error: BaseException | None = None
) -> None:
    """Stop what runs, then describe the run. A failure to stop must not hide why the run ended."""
    try:
        if trainer is not None:
            trainer.close()
    except Exception:
        logger.exception("could not stop the trainer cleanly")
    if session is not None:
        session.close(status, error)


def prepare_process(config: BaseTrainerConfig) -> None:
    """Seed torch, numpy and random from ``config.seed``, set ``config.num_threads``, and quiet other libraries."""
    import numpy as np
    import torch
    import transformers

    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    # Its bars for loading weights would tear our own progress.
    transformers.utils.logging.disable_progress_bar()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
