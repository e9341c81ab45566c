"""The ``tensorboard`` tracker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.api.run_api import RunInfo
from areal_core.errors import PluginError


def _import_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PluginError(
            "trackers: tensorboard is not installed. Install it: pip install 'areal-core[tensorboard]'"
        ) from error
    return SummaryWriter


class TensorBoardTracker:
    """Writes scalars as TensorBoard event files.

    Args:
        run: the run; a resumed one drops what an earlier process wrote after the step it resumes from.
        log_dir: folder of the event files; None: ``RUN/tensorboard``.
        flush_secs: seconds until events are on disk.
    """

    def __init__(self, run: RunInfo, log_dir: str | None = None, flush_secs: int = 30) -> None:
        folder = Path(log_dir) if log_dir else run.path / "tensorboard"
        self._writer = _import_writer()(
            log_dir=str(folder),
            flush_secs=flush_secs,
            purge_step=run.resumed_from + 1 if run.resumed_from else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # A NaN point makes TensorBoard drop the whole smoothed curve.
            if isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
