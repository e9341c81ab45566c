"""Trajectories on disk: one JSON line each, rotated by size, compressed with zstd once rotated."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_core.runs.files import atomic_write
from areal_core.runs.jsonlines import dumps, iter_json_lines, rewrite_json_lines

if TYPE_CHECKING:
    from areal_core.api.io_struct import Trajectory

logger = getLogger("Trajectories")

Split = Literal["train", "eval"]
_NAME = re.compile(r"(?P<split>[a-z_]+)-(?P<index>\d{5,})\.jsonl(?P<zst>\.zst)?")
VOCABULARY = "tokens.jsonl"
#: Trajectories that may wait for the disk; a writer that is ahead by more waits too.
_MOST_WAITING = 4096


def trajectory_files(folder: Path, split: str | None = None) -> list[Path]:
    """The files of a ``trajectories/`` folder in order; of a file that exists plain and compressed, the compressed."""
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and split in (None, match["split"]):
            found[match["split"], int(match["index"])] = path  # "x.jsonl.zst" sorts after "x.jsonl" and wins
    return [found[key] for key in sorted(found)]


def iter_trajectories(path: Path | str, split: str | None = None) -> Iterator[dict[str, Any]]:
    """Read trajectories back: of one file (plain or zstd), of a ``trajectories/`` folder, or of a run directory.

    A torn last line (a process was killed while it wrote) is skipped.

    Args:
        path: file, folder, or run directory.
        split: ``train`` or ``eval`` only.
    """
    path = Path(path)
    if not path.exists():
        raise BadInputError(f"{path}: no such file or folder. Give a run directory or its trajectories/ folder.")
    if path.is_dir():
        folder = path / "trajectories"
        files = trajectory_files(folder if folder.is_dir() else path, split)
    else:
        files = [path]
    for file in files:
        compressed = file.with_name(f"{file.name}.zst")
        # The run may go on meanwhile, and compress the file that was just listed.
        yield from iter_json_lines(file if file.exists() or not compressed.exists() else compressed)


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Text of each token id that occurs in a ``trajectories/`` folder; empty when no tokenizer was set."""
    path = folder / VOCABULARY
    return {int(line["id"]): str(line["text"]) for line in iter_json_lines(path)} if path.exists() else {}


def run_lengths(values: npt.NDArray[Any]) -> list[list[int]]:
    """``[[value, count], ...]`` of a 1-D integer array: masks and versions are constant over long stretches."""
    if len(values) == 0:
        return []
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [[int(values[start]), end - start] for start, end in itertools.pairwise(bounds)]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


class TrajectoryWriter:
    """Appends trajectories to ``{split}-00000.jsonl`` and so on, in a thread of its own. Thread-safe.

    A line holds ``step``, ``time``, ``split``, ``outcome``, ``group_id``, ``reward``, ``rewards`` (the named ones,
    unweighted), ``stop_reason``, ``n_turns``, ``latency`` and ``ttft`` (seconds in the engine, and to the first token;
    null where not known), ``prompt_len``, ``length``, ``prompt``, ``completion``, ``input_ids`` ``[L]`` (prompt and
    completion), ``logprobs`` (of the trained tokens only, rounded to 1e-4), ``loss_mask`` and ``versions`` (as
    ``[[value, count], ...]``), ``metadata``, and of images ``multi_modal_input``: the shape of each tensor.

    A run adds ``uid`` (of the row), ``sample`` (in its group), ``reason`` and ``error`` (of an episode that was not
    accepted), ``attempts``, ``seconds`` (of the episode, its reward included) and ``version`` (of the trainer when the
    episode was collected). An episode that gave no trajectory has these, and none of the trajectory's fields.

    Args:
        folder: the ``trajectories/`` folder.
        max_bytes: a file is rotated once it is larger.

    Attributes:
        tokenizer: if set, the text of every token id seen is kept in ``tokens.jsonl``, and a prompt or completion that
            is not given is decoded from the trajectory.
    """

    def __init__(self, folder: Path, max_bytes: int = 64 * 2**20) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.tokenizer: Any = None
        self._lock = threading.Lock()
        self._vocabulary = read_vocabulary(folder)
        self._vocabulary_new: list[int] = []
        # One thread encodes, writes and compresses; only it touches the files, so they need no lock.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="areal-trajectories")
        self._room = threading.Semaphore(_MOST_WAITING)
        self._files: dict[str, IO[bytes]] = {}
        self._failed = False
        self._closed = False

    def write(
        self,
        step: int,
        trajectory: Trajectory | None,
        *,
        prompt: str | None = None,
        completion: str | None = None,
        outcome: str = "accepted",
        split: Split = "train",
        **extra: Any,
    ) -> None:
        """Append one trajectory; on disk after :meth:`flush`. A full disk is logged once, and does not raise here.

        Args:
            step: the step that trains on it, or that is evaluated.
            trajectory: None for an episode that gave none (rejected, failed). Its arrays must not change any more.
            prompt, completion: text; None: decoded if ``tokenizer`` is set.
            outcome: ``accepted``, ``rejected``, ``failed`` or ``cancelled``.
            extra: further JSON fields of the line.
        """
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "split": split, "outcome": outcome}
        arrays: dict[str, Any] = {}
        if trajectory is not None:
            start = trajectory.prompt_len
            if self.tokenizer is not None:
                # Here and not in the thread: a tokenizer must not be used by two threads at the same time.
                ids = trajectory.input_ids.tolist()
                self._learn(ids)
                if prompt is None:
                    prompt = self.tokenizer.decode(ids[:start], skip_special_tokens=False)
                if completion is None:
                    completion = self.tokenizer.decode(ids[start:], skip_special_tokens=False)
            record |= {
                "group_id": trajectory.group_id,
                "reward": trajectory.reward,
                "rewards": dict(trajectory.rewards),
                "stop_reason": trajectory.stop_reason,
                "n_turns": trajectory.n_turns,
                "latency": _rounded(trajectory.latency),
                "ttft": _rounded(trajectory.ttft),
                "prompt_len": start,
                "length": len(trajectory),
            }
            arrays = {
                "input_ids": trajectory.input_ids,
                "logprobs": trajectory.logprobs,
                "loss_mask": trajectory.loss_mask,
                "versions": trajectory.versions,
            }
            if trajectory.multi_modal_input:
                record["multi_modal_input"] = {k: list(v.shape) for k, v in trajectory.multi_modal_input.items()}
            # The texts stand beside it already.
            extra = {
                "metadata": {k: v for k, v in trajectory.metadata.items() if k not in ("prompt", "completion")},
                **extra,
            }
        record |= {"prompt": prompt, "completion": completion, **extra}
        self._room.acquire()  # Before the lock: the thread that makes room takes the lock too.
        with self._lock:
            if self._closed:
                self._room.release()
            else:
                self._worker.submit(self._append, split, record, arrays)

    def flush(self, *, wait: bool = True) -> None:
        """Hand everything written so far to the operating system."""
        self._run(self._flush, wait=wait)

    def close(self) -> None:
        """Flush, wait for running compressions, and close. What is written later is dropped. May be called twice."""
        try:
            self._run(self._close_files)
        finally:
            with self._lock:
                self._closed = True
            self._worker.shutdown()

    def truncate(self, step: float) -> None:
        """Drop everything that belongs to a later step, atomically per file, and a torn last line."""
        self._run(lambda: self._truncate(step))

    def _learn(self, ids: list[int]) -> None:
        for token_id in set(ids) - self._vocabulary.keys():
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            with self._lock:
                self._vocabulary[token_id] = text
                self._vocabulary_new.append(token_id)

    # ------------------------------------------------------------------------------------------ in the worker thread

    def _run(self, action: Callable[[], None], *, wait: bool = True) -> None:
        with self._lock:
            if self._closed:
                return
            done = self._worker.submit(action)
        if wait:
            done.result()

    def _append(self, split: str, record: dict[str, Any], arrays: dict[str, Any]) -> None:
        try:
            if arrays:
                mask = arrays["loss_mask"]
                record["input_ids"] = arrays["input_ids"].tolist()
                record["logprobs"] = np.round(arrays["logprobs"][mask].astype(np.float64), 4).tolist()
                record["loss_mask"] = run_lengths(mask)
                record["versions"] = run_lengths(arrays["versions"])
            file = self._file(split)
            file.write((dumps(record) + "\n").encode("utf-8", errors="replace"))
            if file.tell() >= self.max_bytes:
                self._rotate(split)
        except Exception as error:
            # What a run learns matters more than its record of it.
            if not self._failed:
                self._failed = True
                logger.warning("cannot write trajectories to %s: %s: %s", self.folder, type(error).__name__, error)
        finally:
            self._room.release()

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
        with self._lock:
            new = {token_id: self._vocabulary[token_id] for token_id in self._vocabulary_new}
            self._vocabulary_new.clear()
        if new:
            lines = [dumps({"id": token_id, "text": text}) + "\n" for token_id, text in new.items()]
            with open(self.folder / VOCABULARY, "ab") as out:
                out.write("".join(lines).encode("utf-8", errors="replace"))

    def _close_files(self) -> None:
        self._flush()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _truncate(self, step: float) -> None:
        self._close_files()
        for path in (*trajectory_files(self.folder), self.folder / VOCABULARY):
            if path.exists():
                rewrite_json_lines(path, lambda line: int(line.get("step", 0)) <= step)
        for path in self.folder.glob("*.jsonl"):  # killed between compressing a file and removing the original
            if path.with_name(f"{path.name}.zst").exists():
                path.unlink()

    def _file(self, split: str) -> IO[bytes]:
        if split not in self._files:
            last = trajectory_files(self.folder, split)[-1:]
            index = 0
            if last:
                match = _NAME.fullmatch(last[0].name)
                assert match is not None
                index = int(match["index"]) + bool(match["zst"])
            path = self.folder / f"{split}-{index:05d}.jsonl"
            self._files[split] = open(path, "ab")  # noqa: SIM115 - stays open until it is full
        return self._files[split]

    def _rotate(self, split: str) -> None:
        import zstandard

        file = self._files.pop(split)
        file.close()
        path = Path(file.name)
        with open(path, "rb") as source, atomic_write(path.with_name(f"{path.name}.zst"), "wb") as out:
            zstandard.ZstdCompressor().copy_stream(source, out)
        path.unlink()
