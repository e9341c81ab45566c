"""The directory of a run: opening it fresh or to resume, and everything that is written into it."""

from __future__ import annotations

import json
import re
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from areal_core.config.document import dump_yaml, read_document
from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_core.runs import lock
from areal_core.runs.environment import describe_environment
from areal_core.runs.files import atomic_dir, atomic_write, clean_leftovers, remove, temporary_beside
from areal_core.runs.jsonlines import dumps
from areal_core.runs.metrics import METRICS_FILE, MetricsFile, read_metrics
from areal_core.runs.trajectories import TrajectoryWriter, iter_trajectories

__all__ = [
    "RunDirectory",
    "atomic_dir",
    "atomic_write",
    "config_differences",
    "iter_trajectories",
    "list_checkpoints",
    "read_metrics",
]

logger = getLogger("RunDirectory")

Resume = Literal["auto", "never", "must"]

FOLDERS = ("trajectories", "checkpoints", "weights", "logs")
#: Keys (with all below them) that may change between a run and its continuation.
MAY_DIFFER = (
    "total_train_steps",
    "total_train_epochs",
    "trackers",
    "evaluation",
    "checkpoint",
    "run.root",
    "num_threads",
    *(f"{model}.offload" for model in ("actor", "critic", "ref", "teacher")),
)
#: Keys of backend strings whose sizes (after the colon) may change, but not the engine's name.
MESH_MAY_DIFFER = ("actor.backend", "critic.backend", "ref.backend", "teacher.backend", "rollout.backend")
_MOST_DIFFERENCES_SHOWN = 20
_STEP = re.compile(r"\D*(\d+)")


def list_checkpoints(run_path: Path) -> list[tuple[int, Path]]:
    """``(step, folder)`` of every complete resumable checkpoint, oldest first.

    A checkpoint is a folder in ``checkpoints/`` whose name ends with its step, e.g. ``step-000010``.
    """
    folder = run_path / "checkpoints"
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.name.startswith("."):
            found.append((int(match[1]), path))
    return sorted(found)


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for name, inner in value.items():
            flat |= _flatten(inner, f"{key}.{name}" if key else str(name))
        return flat
    return {key: value}


def config_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values, but for those that may differ on resume.

    A key that one side lacks counts as null there. A train engine's mesh may change, the engine itself may not: a
    checkpoint is read on any number of ranks, by the engine that wrote it.
    """
    old, new = _flatten(_plain(before)), _flatten(_plain(now))
    differences = {}
    for key in sorted(old.keys() | new.keys()):
        if any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_DIFFER):
            continue
        if old.get(key) in (None, {}) and new.get(key) in (None, {}):
            continue
        if key in MESH_MAY_DIFFER and _engine_of(old.get(key)) == _engine_of(new.get(key)):
            continue
        if old.get(key) != new.get(key):
            differences[key] = (old.get(key), new.get(key))
    # A section that is null on one side and filled on the other would show as the null key and all keys below it.
    return {
        key: pair
        for key, pair in differences.items()
        if not (None in pair and any(other.startswith(f"{key}.") for other in differences))
    }


def _engine_of(backend: Any) -> str | None:
    return backend.partition(":")[0] if isinstance(backend, str) else None


def _make_usable(path: Path) -> None:
    """Make the directory, and prove that files can be written into it (permission bits do not tell)."""
    if path.exists() and not path.is_dir():
        raise BadInputError(f"run directory {path}: this is a file. Choose another run.root or run.name.")
    try:
        for folder in (path, *(path / name for name in FOLDERS)):
            folder.mkdir(parents=True, exist_ok=True)
            probe = temporary_beside(folder / "probe")
            probe.write_bytes(b"x")
            probe.unlink()
            next(iter(folder.iterdir()), None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(
            f"run directory {path}: cannot read and write {error.filename or path}: {reason}. "
            "Choose another run.root, or correct its permissions or the disk."
        ) from error


def _read_config(path: Path) -> dict[str, Any] | None:
    file = path / "config.yaml"
    return read_document(file).tree if file.exists() else None


def _plain(value: Any) -> Any:
    """What YAML can hold: tuples become lists, and what is no plain data (a path) text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


class RunDirectory:
    """A run's directory, held by this process until :meth:`close`. Open it on global rank 0 only.

    Attributes:
        path: absolute path.
        trajectories: writer of ``trajectories/``.
        resumed: whether there is a checkpoint to go on from.
    """

    _held: ClassVar[weakref.WeakValueDictionary[Path, RunDirectory]] = weakref.WeakValueDictionary()

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path, self.resumed = path, resumed
        self.metrics = MetricsFile(path / METRICS_FILE)
        self.trajectories = TrajectoryWriter(path / "trajectories")
        self._closed = False

    @classmethod
    def open(cls, config_plain: Mapping[str, Any], path: Path | str, resume: Resume = "auto") -> RunDirectory:
        """Make a fresh run directory, or take up an existing one.

        Args:
            config_plain: the resolved configuration as plain data; written to ``config.yaml``.
            path: the directory.
            resume: ``never``: only a fresh run; ``must``: only a run with a checkpoint; ``auto``: go on from a
                checkpoint if there is one, else start (over).

        Raises:
            BadInputError: if the directory cannot be used, is in use, is of another configuration, or does not fit
                ``resume``. Nothing of a run in it is changed then.
        """
        path = Path(path).absolute()
        if resume == "must" and not list_checkpoints(path):
            raise BadInputError(
                f"--resume must: {path} has no checkpoint to resume from. Use --resume auto to start it, "
                "or check run.root and run.name."
            )
        _make_usable(path)
        held = cls._held.get(path)
        if held is not None:
            raise BadInputError(
                f"{path}: this process is using this run already. Close it first, or use another run.name."
            )
        lock.acquire(path)
        try:
            run = cls._open_locked(config_plain, path, resume)
        except BaseException:
            lock.release(path)
            raise
        cls._held[path] = run
        return run

    @classmethod
    def _open_locked(cls, config_plain: Mapping[str, Any], path: Path, resume: Resume) -> RunDirectory:
        resumed = bool(list_checkpoints(path))
        metrics = path / METRICS_FILE
        started = resumed or (metrics.exists() and metrics.stat().st_size > 0)
        if started and resume == "never":
            raise BadInputError(
                f"{path}: a run is in this directory already. Use --resume auto to go on with it, or another run.name."
            )
        stored = _read_config(path) if resumed else None
        if stored is not None:
            _check_same_config(path, stored, config_plain)
        for folder in (path, *(path / name for name in FOLDERS)):
            clean_leftovers(folder)
        if resumed:
            run = cls(path, resumed=True)
            run.metrics.truncate(float("inf"))  # torn last lines go
            run.trajectories.truncate(float("inf"))
        else:
            metrics.unlink(missing_ok=True)
            remove(path / "state.json")
            for leftover in (path / "trajectories").iterdir():
                remove(leftover)
            run = cls(path, resumed=False)
        with atomic_write(path / "config.yaml") as out:
            out.write(dump_yaml(_plain(config_plain)))
        _write_environment(path, keep=resumed)
        run.write_state({**run.read_state(), "status": "running", "error": None, "started": time.time()})
        return run

    @property
    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        found = list_checkpoints(self.path)
        return found[-1] if found else None

    def log_file(self, rank: int = 0) -> Path:
        """Where a rank's log goes."""
        return self.path / "logs" / f"rank-{rank}.log"

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl`` at once; trajectories follow soon. NaN and infinity become null."""
        self.metrics.log(step, metrics)
        self.trajectories.flush(wait=False)

    def truncate(self, step: int) -> None:
        """Drop metrics and trajectories of steps after ``step``: they will be made again by the resumed run."""
        self.metrics.truncate(step)
        self.trajectories.truncate(step)

    def read_state(self) -> dict[str, Any]:
        """What ``state.json`` holds; empty if there is none.

        Raises:
            BadInputError: if the file is damaged.
        """
        file = self.path / "state.json"
        hint = "Remove the file to go on; only the ranking of the best weights is lost."
        try:
            state = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise BadInputError(f"{file}: cannot read the run's state: {error}. {hint}") from error
        if not isinstance(state, dict):
            raise BadInputError(f"{file}: holds no JSON object. {hint}")
        return state

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace ``state.json`` atomically. ``status`` and ``started`` stay as they are unless given."""
        current = self.read_state()
        kept = {key: current[key] for key in ("status", "error", "started") if key in current}
        with atomic_write(self.path / "state.json") as out:
            out.write(dumps({**kept, **state, "updated": time.time()}))

    def set_status(self, status: str, error: BaseException | str | None = None) -> None:
        """Record how the run stands: ``running``, ``finished``, ``interrupted`` or ``failed``."""
        self.write_state({**self.read_state(), "status": status, "error": None if error is None else str(error)})

    def close(self) -> None:
        """Flush and give the directory back. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self.metrics.close()
            self.trajectories.close()
        finally:
            lock.release(self.path)
            if RunDirectory._held.get(self.path) is self:
                del RunDirectory._held[self.path]

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check_same_config(path: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = config_differences(stored, now)
    if not differences:
        return
    shown = [
        f"  {key}: {json.dumps(old)} in the run, {json.dumps(new)} now"
        for key, (old, new) in list(differences.items())[:_MOST_DIFFERENCES_SHOWN]
    ]
    if len(differences) > _MOST_DIFFERENCES_SHOWN:
        shown.append(f"  and {len(differences) - _MOST_DIFFERENCES_SHOWN} more")
    raise BadInputError(
        f"{path}: this directory holds a run of another configuration, and resuming needs the same one. "
        "These keys differ:\n" + "\n".join(shown) + "\nSet them back, or use another run.name. "
        f"(These may change: {', '.join(MAY_DIFFER)}, and the sizes in {', '.join(MESH_MAY_DIFFER)}.)"
    )


def _write_environment(path: Path, *, keep: bool) -> None:
    file = path / "environment.json"
    earlier: list[Any] = []
    if keep:
        try:
            stored = json.loads(file.read_text("utf-8"))
            earlier = [*stored.pop("earlier", []), stored]
        except (OSError, ValueError, AttributeError) as error:
            logger.warning("%s: cannot read the earlier environment: %s", file, error)
    with atomic_write(file) as out:
        json.dump({**describe_environment(), "earlier": earlier}, out, indent=2)
