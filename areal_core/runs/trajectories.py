"""Trajectories on disk: one JSON line each, rotated by size, compressed with zstd once rotated."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

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


def run_lengths(values: Sequence[Any]) -> list[list[Any]]:
    """``[[value, count], ...]``: masks and versions are constant over long stretches."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs


class TrajectoryWriter:
    """Appends trajectories to ``{split}-00000.jsonl`` and so on. Thread-safe.

    A line holds ``step``, ``time``, ``split``, ``outcome``, ``group_id``, ``reward``, ``rewards``, ``stop_reason``,
    ``n_turns``, ``prompt_len``, ``length``, ``prompt``, ``completion``, ``input_ids`` ``[L]``, ``logprobs`` (of the
    trained tokens only, rounded to 1e-4), ``loss_mask`` and ``versions`` (as ``[[value, count], ...]``), ``metadata``.

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
        self._files: dict[str, IO[bytes]] = {}
        self._vocabulary = read_vocabulary(folder)
        self._vocabulary_new: list[int] = []
        self._executor: ThreadPoolExecutor | None = None
        self._compressions: list[Future[None]] = []
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
        """Append one trajectory; on disk after :meth:`flush` at the latest.

        Args:
            step: the step that trains on it, or that is evaluated.
            trajectory: None for an episode that gave none (rejected, failed).
            prompt, completion: text; None: decoded if ``tokenizer`` is set.
            outcome: ``accepted``, ``rejected``, ``failed`` or ``cancelled``.
            extra: further JSON fields of the line.
        """
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "split": split, "outcome": outcome}
        if trajectory is not None:
            ids = trajectory.input_ids.tolist()
            mask = trajectory.loss_mask
            start = trajectory.prompt_len
            if self.tokenizer is not None:
                self._learn(ids)
                if prompt is None:
                    prompt = self.tokenizer.decode(ids[:start], skip_special_tokens=False)
                if completion is None:
                    completion = self.tokenizer.decode(ids[start:], skip_special_tokens=False)
            record |= {
                "group_id": trajectory.group_id,
                "reward": float(trajectory.reward),
                "rewards": trajectory.rewards,
                "stop_reason": trajectory.stop_reason,
                "n_turns": trajectory.n_turns,
                "prompt_len": start,
                "length": len(ids),
                "prompt": prompt,
                "completion": completion,
                "input_ids": ids,
                "logprobs": [round(value, 4) for value in trajectory.logprobs[mask].tolist()],
                "loss_mask": run_lengths([int(value) for value in mask.tolist()]),
                "versions": run_lengths(trajectory.versions.tolist()),
                # The texts stand above already.
                "metadata": {k: v for k, v in trajectory.metadata.items() if k not in ("prompt", "completion")},
            }
        else:
            record |= {"prompt": prompt, "completion": completion}
        line = (dumps(record | extra) + "\n").encode("utf-8", errors="replace")
        with self._lock:
            if self._closed:
                return
            file = self._file(split)
            file.write(line)
            if file.tell() >= self.max_bytes:
                self._rotate(split)

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Flush, wait for running compressions, and close. What is written later is dropped."""
        with self._lock:
            self._flush()
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._closed = True
        self._wait()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def truncate(self, step: float) -> None:
        """Drop everything that belongs to a later step, atomically per file, and a torn last line."""
        with self._lock:
            self._flush()
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._wait()
            for path in (*trajectory_files(self.folder), self.folder / VOCABULARY):
                if path.exists():
                    rewrite_json_lines(path, lambda line: int(line.get("step", 0)) <= step)
            for path in self.folder.glob("*.jsonl"):  # killed between compressing a file and removing the original
                if path.with_name(f"{path.name}.zst").exists():
                    path.unlink()

    def _learn(self, ids: list[int]) -> None:
        for token_id in set(ids) - self._vocabulary.keys():
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            with self._lock:
                self._vocabulary[token_id] = text
                self._vocabulary_new.append(token_id)

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
        if self._vocabulary_new:
            lines = [dumps({"id": token_id, "text": self._vocabulary[token_id]}) for token_id in self._vocabulary_new]
            self._vocabulary_new.clear()
            with open(self.folder / VOCABULARY, "ab") as out:
                out.write(("\n".join(lines) + "\n").encode("utf-8", errors="replace"))

    def _file(self, split: str) -> IO[bytes]:
        if split not in self._files:
            last = trajectory_files(self.folder, split)[-1:]
            index = 0
            if last:
                match = _NAME.fullmatch(last[0].name)
                assert match is not None
                index = int(match["index"]) + bool(match["zst"])
            self._files[split] = self._open(split, index)
        return self._files[split]

    def _open(self, split: str, index: int) -> IO[bytes]:
        return open(self.folder / f"{split}-{index:05d}.jsonl", "ab")

    def _rotate(self, split: str) -> None:
        full = self._files.pop(split)
        full.close()
        path = Path(full.name)
        match = _NAME.fullmatch(path.name)
        assert match is not None
        self._files[split] = self._open(split, int(match["index"]) + 1)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="areal-zstd")
        self._compressions.append(self._executor.submit(_compress, path))

    def _wait(self) -> None:
        for compression in self._compressions:
            try:
                compression.result()
            except OSError as error:
                logger.warning("could not compress a trajectory file, it stays as it is: %s", error)
        self._compressions.clear()


def _compress(path: Path) -> None:
    import zstandard

    with open(path, "rb") as source, atomic_write(path.with_name(f"{path.name}.zst"), "wb") as out:
        zstandard.ZstdCompressor().copy_stream(source, out)
    path.unlink()
