"""Requests, and the table of the rows that are being decoded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from areal_core.api.io_struct import ModelRequest, ModelResponse, StopReason
from areal_core.api.supports import Supports, from_rows


@attrs.define(eq=False)
class Pending:
    """A request inside the engine.

    Attributes:
        request: as submitted.
        max_out: most tokens to generate, the context considered.
        stop_ids: ids that end it.
        seed: 64-bit seed.
        tokenizer: for stop strings.
        future, loop: where the answer goes.
        cancelled: set by the caller's thread; the row is freed before the next step.
        number: names it between the engine and its process.
        images: the tensors of its images, by the model's own names; empty for text.
        supports: the ids that were kept for each token, if the request asks for them.
    """

    request: ModelRequest
    max_out: int
    stop_ids: tuple[int, ...]
    seed: int
    tokenizer: Any
    future: asyncio.Future[ModelResponse]
    loop: asyncio.AbstractEventLoop
    cancelled: bool = False
    submitted: float = attrs.field(factory=time.perf_counter)
    first_token: float = 0.0
    number: int = 0
    images: Mapping[str, Any] = attrs.field(factory=dict)
    supports: list[npt.NDArray[np.int32]] = attrs.field(factory=list)

    def response(
        self,
        tokens: list[int],
        logprobs: list[float],
        versions: list[int],
        stop_reason: StopReason,
        supports: Supports | None = None,
    ) -> ModelResponse:
        now = time.perf_counter()
        return ModelResponse(
            input_tokens=list(self.request.input_ids),
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            output_supports=supports,
            stop_reason=stop_reason,
            latency=now - self.submitted,
            ttft=(self.first_token or now) - self.submitted,
            metadata=self.request.metadata,
        )


class Rows:
    """Structure of arrays over the decoded rows; entry ``i`` of each belongs to row ``i`` of the KV cache.

    ``count`` rows are in use or holes among them (``requests[i] is None``).
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.count = 0
        self.requests: list[Pending | None] = []
        self.holes: list[int] = []
        self.changes = 0
        """Grows whenever a request enters, leaves or moves."""
        self.fresh: npt.NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        """Rows whose keys and values must be computed from the whole sequence."""
        self.length: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.generated: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.max_out: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.min_out: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.last: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(max_rows, dtype=np.uint64)
        self.temperature: npt.NDArray[np.float32] = np.ones(max_rows, dtype=np.float32)
        self.greedy: npt.NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.top_k: npt.NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.top_p: npt.NDArray[np.float32] = np.ones(max_rows, dtype=np.float32)
        self.min_p: npt.NDArray[np.float32] = np.zeros(max_rows, dtype=np.float32)
        self.penalty: npt.NDArray[np.float32] = np.zeros(max_rows, dtype=np.float32)
        self.supports: npt.NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        """Rows whose requests want to know what was kept."""
        self.strings: npt.NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self.stop_ids: npt.NDArray[np.int64] = np.full((max_rows, 1), -1, dtype=np.int64)
        self.out_tokens: npt.NDArray[np.int64] = np.zeros((max_rows, 64), dtype=np.int64)
        self.out_logprobs: npt.NDArray[np.float32] = np.zeros((max_rows, 64), dtype=np.float32)
        self.out_versions: npt.NDArray[np.int32] = np.zeros((max_rows, 64), dtype=np.int32)

    @property
    def running(self) -> int:
        return self.count - len(self.holes)

    @property
    def room(self) -> int:
        return self.max_rows - self.running

    def add(self, pending: Pending) -> int:
        """Give a request the first free row."""
        self.changes += 1
        if self.holes:
            row = self.holes.pop(0)
            self.requests[row] = pending
        else:
            row = self.count
            self.requests.append(pending)
            self.count += 1
        gconfig = pending.request.gconfig
        self.fresh[row] = True
        self.length[row] = len(pending.request.input_ids)
        self.generated[row] = 0
        self.max_out[row] = pending.max_out
        self.min_out[row] = gconfig.min_new_tokens
        self.seed[row] = pending.seed
        self.temperature[row] = gconfig.effective_temperature
        self.greedy[row] = gconfig.is_greedy
        self.top_k[row] = gconfig.top_k
        self.top_p[row] = gconfig.top_p
        self.min_p[row] = gconfig.min_p
        self.penalty[row] = gconfig.frequency_penalty
        self.supports[row] = pending.request.return_supports
        self.strings[row] = bool(gconfig.stop)
        if len(pending.stop_ids) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(pending.stop_ids), -1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(pending.stop_ids)] = pending.stop_ids
        return row

    def append(
        self,
        rows: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """One more token for each of ``rows``."""
        at = self.generated[rows]
        needed = int(at.max()) + 1
        if needed > self.out_tokens.shape[1]:
            width = max(needed, 2 * self.out_tokens.shape[1])
            self.out_tokens = _widened(self.out_tokens, width, 0)
            self.out_logprobs = _widened(self.out_logprobs, width, 0)
            self.out_versions = _widened(self.out_versions, width, 0)
        self.out_tokens[rows, at] = tokens
        self.out_logprobs[rows, at] = logprobs
        self.out_versions[rows, at] = version
        self.generated[rows] = at + 1
        self.length[rows] += 1
        self.last[rows] = tokens

    def sequence(self, row: int) -> list[int]:
        """Prompt and what was generated."""
        pending = self.requests[row]
        assert pending is not None
        return [*pending.request.input_ids, *self.out_tokens[row, : self.generated[row]].tolist()]

    def response(self, row: int, stop_reason: StopReason) -> ModelResponse:
        pending, size = self.requests[row], self.generated[row]
        assert pending is not None
        return pending.response(
            self.out_tokens[row, :size].tolist(),
            self.out_logprobs[row, :size].tolist(),
            self.out_versions[row, :size].tolist(),
            stop_reason,
            from_rows(pending.supports) if self.supports[row] else None,
        )

    def remove(self, row: int) -> None:
        """Free a row; it stays as a hole until a request or ``compact`` fills it."""
        self.changes += 1
        self.requests[row] = None
        self.fresh[row] = False
        self.length[row] = 1
        self.holes.append(row)
        self.holes.sort()

    def compact(self) -> tuple[list[int], list[int]]:
        """Close the holes with rows from the end; returns (from, to) of the rows that moved."""
        self.changes += 1
        running = self.running
        targets = [row for row in self.holes if row < running]
        sources = [row for row in range(running, self.count) if self.requests[row] is not None]
        if sources:
            for array in self._arrays():
                array[targets] = array[sources]
            for source, target in zip(sources, targets, strict=True):
                self.requests[target] = self.requests[source]
        del self.requests[running:]
        self.fresh[running : self.count] = False
        self.count = running
        self.holes.clear()
        return sources, targets

    def _arrays(self) -> list[npt.NDArray[Any]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]


def _widened(array: npt.NDArray[Any], width: int, fill: int) -> npt.NDArray[Any]:
    wider = np.full((array.shape[0], width), fill, dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
