"""What an observer may know of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class RunInfo:
    """One run.

    Attributes:
        name: the run's name.
        path: its directory.
        config: the resolved configuration as plain data.
        trainer: ``rl``, ``sft``, ...
        resumed_from: the step it was resumed from; 0 for a fresh run.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    trainer: str
    resumed_from: int = 0
