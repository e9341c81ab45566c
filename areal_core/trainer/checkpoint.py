"""Checkpoints that resume a run exactly, and weights worth keeping.

``checkpoints/step-000010/`` holds each engine's training state (torch.distributed.checkpoint) and ``trainer.json``:
step, version, data position, rollout state. ``weights/step-000010/`` holds weights in Hugging Face layout.
A folder appears under its name only when it is complete on disk. With ``checkpoint.async_save`` the training state is
copied, and written while the next steps run; until it is complete, and if it never is, the checkpoint before it counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from areal_core.api.io_struct import SaveLoadMeta
from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_core.runs.files import atomic_dir, remove
from areal_core.runs.listing import default_mode
from areal_core.runs.run_dir import list_checkpoints

if TYPE_CHECKING:
    from areal_core.api.configs import CheckpointConfig
    from areal_core.api.engine_api import TrainEngine
    from areal_core.trainer.residency import Residency
    from areal_core.trainer.session import RunSession
    from areal_core.trainer.world import World


logger = getLogger("Checkpointer")


@attrs.frozen
class _OpenCheckpoint:
    """One that is being written.

    Attributes:
        final: its name when it is complete.
        folder: leaving it without an exception gives the folder that name.
    """

    step: int
    final: Path
    folder: ExitStack


class Checkpointer:
    """Saves and restores a run. Its methods are collective over all ranks unless they say otherwise."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_path: Path,
        world: World,
        session: RunSession | None,
        engines: Mapping[str, TrainEngine],
        tokenizer: Any,
        *,
        default_metric: str,
        residency: Residency | None = None,
    ) -> None:
        self.config = config
        self.metric = config.metric or default_metric
        self.mode = config.mode or default_mode(self.metric)
        self.run_path = run_path
        self.world = world
        self.session = session
        self.engines = engines
        self.tokenizer = tokenizer
        self.residency = residency
        self._last_saved_at = time.monotonic()
        self._last_saved_step = -1
        self._open: _OpenCheckpoint | None = None
        self._restored = run_path

    # ------------------------------------------------------------------------------------------- training state

    def due(self, step: int) -> bool:
        """Whether to save after ``step``. Rank 0 only: ranks must not decide by their own clocks."""
        config = self.config
        by_step = config.freq_steps is not None and step % config.freq_steps == 0
        by_time = config.freq_secs is not None and time.monotonic() - self._last_saved_at >= config.freq_secs
        return by_step or by_time

    def save(self, step: int, trainer_state: Mapping[str, Any]) -> None:
        """Write the checkpoint of ``step``, or with ``async_save`` begin to: see ``poll`` and ``finish``.

        Args:
            trainer_state: rank 0's; JSON-compatible.

        Raises:
            ArealError: if it cannot be written; the checkpoint before it is untouched.
        """
        if step == self._last_saved_step:
            return
        self.finish()
        final = self.run_path / "checkpoints" / f"step-{step:06d}"
        with ExitStack() as stack, self._explained(step, final):
            folder = stack.enter_context(self._folder(final))
            for name, engine in self.engines.items():
                engine.save(
                    SaveLoadMeta(
                        path=folder / name,
                        weight_format="dcp",
                        with_optim=True,
                        background=self.config.async_save,
                    )
                )
            if self.world.is_main:
                (folder / "trainer.json").write_text(json.dumps({"step": step, **trainer_state}))
            self._open = _OpenCheckpoint(step, final, stack.pop_all())
        self._last_saved_at, self._last_saved_step = time.monotonic(), step
        if not self.config.async_save:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint that is being written in the background if every rank has written its part."""
        if self._open is not None and self.world.all(not any(e.is_saving for e in self.engines.values())):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it its name.

        Raises:
            ArealError: as ``save``.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        with self._explained(opened.step, opened.final), opened.folder:
            for engine in self.engines.values():
                engine.finish_saving()
        if self.session is not None:
            self._write_state(step=opened.step)
            checkpoints = [path for _, path in list_checkpoints(self.run_path)]
            for path in checkpoints[: -self.config.keep_last]:
                remove(path)
            self.session.checkpoint_saved(opened.step, opened.final)

    def close(self) -> None:
        """After a failed run: keep what is being written if that needs no other rank, which may be dead. Local."""
        if self._open is None or self.world.size > 1:
            return
        try:
            self.finish()
        except Exception as error:
            logger.error("%s", error)

    def restore(self) -> dict[str, Any] | None:
        """Load the newest checkpoint; returns rank 0's trainer state on every rank, or None for a fresh run."""
        latest = self.session.directory.latest_checkpoint if self.session is not None else None
        name = self.world.agree(latest[1].name if latest is not None else None)
        if name is None:
            return None
        self._restored = path = self.run_path / "checkpoints" / str(name)
        try:
            restored: dict[str, Any] = json.loads((path / "trainer.json").read_text())
            if not isinstance(restored, dict) or not isinstance(restored.get("step"), int):
                raise ValueError("trainer.json holds no 'step'")
            for engine_name, engine in self.engines.items():
                self._use(engine)
                engine.load(SaveLoadMeta(path=path / engine_name, weight_format="dcp", with_optim=True))
        except (OSError, ValueError, BadInputError) as error:
            raise _unreadable(path, str(error)) from error
        self._last_saved_step = int(restored["step"])
        if self.session is not None:
            # Steps after the checkpoint are done again: what they ranked is not true any more.
            best = self.session.directory.read_state().get("best", [])
            self._write_state(step=restored["step"], best=[b for b in best if b[0] <= restored["step"]])
        return restored

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within it, what :meth:`restore` gave is used; what it lacks is an error that names the file."""
        try:
            yield
        except KeyError as error:
            raise _unreadable(self._restored, f"trainer.json holds no {error.args[0]!r}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise _unreadable(self._restored, f"trainer.json: {error}") from error

    # -------------------------------------------------------------------------------------------------- weights

    def export(self, name: str, engine: TrainEngine) -> Path:
        """Write ``weights/NAME`` in Hugging Face layout."""
        final = self.run_path / "weights" / name
        self._use(engine)
        with self._folder(final) as folder:
            engine.save(SaveLoadMeta(path=folder, weight_format="hf", tokenizer=self.tokenizer))
        return final

    def keep_if_best(self, step: int, metrics: Mapping[str, float], engine: TrainEngine) -> None:
        """Export the weights if they are among the ``keep_best`` best so far by ``checkpoint.metric``."""
        config = self.config
        if config.keep_best == 0:
            return
        ranking: list[list[float]] = []
        if self.session is not None and math.isfinite(metrics.get(self.metric, math.nan)):
            state = self.session.directory.read_state()
            ranking = [entry for entry in state.get("best", []) if entry[0] != step]
            ranking.append([step, float(metrics[self.metric])])
            # Of equally good ones the earlier stays: it cost fewer steps.
            ranking.sort(key=lambda entry: (-entry[1] if self.mode == "max" else entry[1], entry[0]))
            ranking = ranking[: config.keep_best]
        keep = bool(self.world.agree(any(entry[0] == step for entry in ranking)))
        if keep:
            self.export(f"step-{step:06d}", engine)
            if self.session is not None:
                self._write_state(best=ranking)
                best = {f"step-{int(entry[0]):06d}" for entry in ranking}
                for path in (self.run_path / "weights").glob("step-*"):
                    if path.name not in best:
                        remove(path)

    # -------------------------------------------------------------------------------------------------- private

    def _use(self, engine: TrainEngine) -> None:
        if self.residency is not None:
            self.residency.use(engine)

    @contextmanager
    def _explained(self, step: int, final: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ArealError) as error:
            earlier = [path for _, path in list_checkpoints(self.run_path)]
            rest = f"{earlier[-1].name} is the last complete one" if earlier else "there is no earlier one"
            raise ArealError(
                f"the checkpoint of step {step} could not be written to {final}: {str(error).rstrip('.')}. It was "
                f"removed, and {rest}. Make room or correct the disk, then go on with `--resume auto`."
            ) from error

    @contextmanager
    def _folder(self, final: Path) -> Iterator[Path]:
        """A folder that all ranks fill together; it takes its name when all are done."""
        with ExitStack() as stack:
            mine = stack.enter_context(atomic_dir(final, overwrite=True)) if self.world.is_main else None
            yield Path(self.world.agree(str(mine) if mine is not None else None))
            self.world.barrier()
        self.world.barrier()

    def _write_state(self, **changes: Any) -> None:
        assert self.session is not None
        directory = self.session.directory
        directory.write_state({**directory.read_state(), **changes})


def _unreadable(path: Path, reason: str) -> BadInputError:
    return BadInputError(
        f"{path}: this checkpoint cannot be read ({reason.rstrip('.')}). "
        "Remove the folder to go on from the one before, or start over with another run.name."
    )
