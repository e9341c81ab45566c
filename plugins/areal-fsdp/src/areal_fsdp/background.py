"""A checkpoint that is written while training goes on."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from areal_core.errors import ArealError


class BackgroundSave:
    """One save under way on this rank. Its tensors are copies, so that training may change the live ones."""

    def __init__(self, future: Future[Any], path: Path) -> None:
        self.future, self.path = future, path

    @property
    def done(self) -> bool:
        """Whether this rank's part is written, or has failed."""
        return self.future.done()

    def wait(self) -> None:
        """Until the files of this rank are written.

        Raises:
            ArealError: if they could not be.
        """
        try:
            self.future.result()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise save_error(self.path, error) from error


def save_error(path: Path, error: BaseException) -> ArealError:
    """What a user reads when a save failed: the first cause, without the trace that torch wraps it in."""
    return ArealError(f"{path}: cannot write the checkpoint ({cause(error)}).")


def cause(error: BaseException) -> str:
    """One line about the error that a ``CheckpointException`` (which is no ``Exception``) wraps, or about itself."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    text = str(error).strip().splitlines()
    if isinstance(error, ArealError) and text:
        return text[-1]
    return f"{type(error).__name__}: {text[-1] if text else 'no message'}"
