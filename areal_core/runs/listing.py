"""Runs as ``areal runs`` shows them: read from their directories alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from areal_core.config.document import read_document
from areal_core.errors import BadInputError, did_you_mean
from areal_core.runs import lock
from areal_core.runs.metrics import METRICS_FILE, best_metric, read_metrics
from areal_core.runs.run_dir import list_checkpoints


@attrs.frozen(kw_only=True)
class RunSummary:
    """One run.

    Attributes:
        status: ``running``, ``finished``, ``interrupted``, ``failed``, ``killed`` (it says running, but its process is
            gone), ``new`` (nothing recorded yet), or ``damaged`` (``problem`` says how).
        step: last step with metrics; 0 if none.
        best: ``(metric, step, value)`` by the run's ``checkpoint.metric``, if it was ever measured.
        started, updated: seconds since the epoch.
    """

    name: str
    path: Path
    status: str
    trainer: str = ""
    step: int = 0
    last: Mapping[str, Any] = attrs.field(factory=dict)
    best: tuple[str, int, float] | None = None
    checkpoints: list[int] = attrs.field(factory=list)
    weights: list[str] = attrs.field(factory=list)
    started: float | None = None
    updated: float | None = None
    error: str | None = None
    problem: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """JSON data."""
        plain = attrs.asdict(self, recurse=False)
        plain["path"] = str(self.path)
        plain["best"] = dict(zip(("metric", "step", "value"), self.best, strict=True)) if self.best else None
        report = self.path / "report.html"
        plain["report"] = str(report) if report.exists() else None
        return plain


def is_run_directory(path: Path) -> bool:
    """Whether a run lives there."""
    return (path / "config.yaml").is_file() and ((path / "state.json").exists() or (path / METRICS_FILE).exists())


def default_mode(metric: str) -> str:
    """Whether more of a metric is better (``max``) or less (``min``), by its name."""
    return "max" if any(word in metric for word in ("reward", "accuracy", "margin")) else "min"


def read_config(path: Path) -> dict[str, Any]:
    """A run's configuration as plain data; empty if it cannot be read."""
    try:
        return read_document(path / "config.yaml").tree
    except BadInputError:
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise ValueError("holds no JSON object")
    return value


def _status(path: Path, state: Mapping[str, Any]) -> str:
    status = str(state.get("status", "new"))
    if status == "running":
        owner = lock.read_owner(path)
        return "running" if owner is not None and lock.is_alive(owner) else "killed"
    return status


def summarize(path: Path, rows: list[dict[str, Any]] | None = None) -> RunSummary:
    """Read one run. A damaged file does not raise; it gives the status ``damaged``.

    Args:
        rows: its metrics, if read already.
    """
    config = read_config(path)
    problem = None
    state: dict[str, Any] = {}
    try:
        state = read_json(path / "state.json")
        rows = read_metrics(path) if rows is None else rows
    except (OSError, ValueError, BadInputError) as error:
        problem, rows = str(error), rows or []
    checkpoint = config.get("checkpoint") or {}
    # The same defaults as the trainer's, which a stored configuration leaves as null.
    metric = str(checkpoint.get("metric") or ("eval/reward" if config.get("trainer") == "rl" else "eval/loss"))
    mode = str(checkpoint.get("mode") or default_mode(metric))
    best = best_metric(rows, metric, mode)
    weights = path / "weights"
    return RunSummary(
        name=path.name,
        path=path,
        status="damaged" if problem else _status(path, state),
        trainer=str(config.get("trainer", "")),
        step=int(rows[-1]["step"]) if rows else 0,
        last=rows[-1] if rows else {},
        best=None if best is None else (metric, *best),
        checkpoints=[step for step, _ in list_checkpoints(path)],
        weights=sorted(p.name for p in weights.iterdir() if not p.name.startswith(".")) if weights.is_dir() else [],
        started=state.get("started"),
        updated=state.get("updated"),
        error=state.get("error"),
        problem=problem,
    )


def find_runs(root: Path) -> list[Path]:
    """Run directories below ``root`` (two levels at most), the newest last.

    Raises:
        BadInputError: if ``root`` is no folder.
    """
    if not root.is_dir():
        raise BadInputError(f"--root: {root} is not a folder. Give the folder that holds the runs (run.root).")
    found = [
        path
        for pattern in ("*", "*/*")
        for path in root.glob(pattern)
        if not path.name.startswith(".") and is_run_directory(path)
    ]
    return sorted(found, key=lambda path: ((path / "config.yaml").stat().st_mtime, str(path)))


def resolve_run(name: str, root: Path) -> Path:
    """The directory that a user means: a path, or the name of a run below ``root``.

    Raises:
        BadInputError: if there is none; lists those that exist.
    """
    for path in (Path(name), root / name):
        if is_run_directory(path):
            return path
    if Path(name).is_dir():
        raise BadInputError(f"{name}: not a run directory: it has no config.yaml with metrics.jsonl or state.json.")
    known = [str(path.relative_to(root)) for path in find_runs(root)] if root.is_dir() else []
    there = f"Runs in {root}: {', '.join(known[-20:])}." if known else f"{root} holds no runs."
    raise BadInputError(
        f"no run {name!r}. Give its directory, or its name in --root. {there}{did_you_mean(name, known)}"
    )
