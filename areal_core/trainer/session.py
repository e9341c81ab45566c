"""What a run shows to the outside: its directory, metrics, trackers, progress, and the plugins that observe it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.api.run_api import RunInfo
from areal_core.logging import getLogger

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig
    from areal_core.api.io_struct import Trajectory, WeightUpdateMeta
    from areal_core.plugins.manager import PluginManager
    from areal_core.runs.progress import Progress
    from areal_core.runs.run_dir import RunDirectory

logger = getLogger("Trainer")


class RunSession:
    """The outside of a run. Exists on global rank 0 only; the other ranks hold None."""

    def __init__(
        self,
        config: BaseTrainerConfig,
        plain: Mapping[str, Any],
        directory: RunDirectory,
        manager: PluginManager,
        *,
        resumed_from: int,
    ) -> None:
        from areal_core.runs.trackers import TrackerSet

        self.directory = directory
        self.manager = manager
        self.info = RunInfo(
            name=config.run.name,
            path=directory.path,
            config=plain,
            trainer=str(plain["trainer"]),
            resumed_from=resumed_from,
        )
        self.trackers = TrackerSet.from_config(config.trackers, self.info, manager)
        self.progress: Progress | None = None
        self._notify("areal_run_configured")

    @property
    def path(self) -> Path:
        return self.directory.path

    def start_progress(self, total_steps: int) -> None:
        from areal_core.runs.progress import Progress

        title = f"{self.info.trainer} {self.info.name}"
        self.progress = Progress(total_steps, initial=self.info.resumed_from, title=title)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step: ``metrics.jsonl``, trackers, progress, observers."""
        self.directory.log_metrics(step, metrics)
        self.trackers.log(step, metrics)
        if self.progress is not None:
            self.progress.update(step, metrics)
        self._notify("areal_step_finished", step=step, metrics=metrics)

    def trajectory_finished(self, trajectory: Trajectory | None, outcome: str) -> None:
        self._notify("areal_trajectory_finished", trajectory=trajectory, outcome=outcome)

    def weights_updated(self, version: int, meta: WeightUpdateMeta) -> None:
        self._notify("areal_weights_updated", version=version, meta=meta)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        logger.info("step %d: saved %s", step, path)
        self._notify("areal_checkpoint_saved", step=step, path=path)

    def close(self, status: str, error: BaseException | None = None) -> None:
        """End the run: its state, the report, and the last hook. Never raises: the run's own error matters more."""
        from areal_core.runs.report import build_report

        if self.progress is not None:
            self.progress.close()
        self.trackers.close()
        try:
            self.directory.set_status(status, None if error is None else f"{type(error).__name__}: {error}")
            self.directory.close()
            build_report(self.directory.path)
        except Exception:
            logger.exception("could not finish the run directory %s", self.directory.path)
        self._notify("areal_run_finished", status=status, error=error)

    def _notify(self, hook: str, **arguments: Any) -> None:
        self.manager.call_lifecycle(hook, run=self.info, **arguments)
