"""The generation loop: one thread that owns the rows and computes every token."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from areal_core.api.io_struct import ModelResponse, StopReason
from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_local.compiled import fast_uniform, kernels_for, sample_plain
from areal_local.decoder import Decoder
from areal_local.rows import Pending, Rows
from areal_local.sampling import SamplingParams, sample_from_candidates, streams

_logger = getLogger("LocalGeneration")

#: Tokens to come that a prefill makes room for, if a request may have as many.
_ROOM = 256

_NONE = torch.empty(0, dtype=torch.float64)

Done = tuple[Pending, ModelResponse | BaseException]


class GenerationLoop:
    """Continuous batching: waiting requests enter free rows before a step, finished rows leave after it.

    A step is a prefill (new rows, and rows whose weights changed) or one token for every row.

    Args:
        decoder: computes logits.
        device: where it does.
        vocab_size: ids at or above are never stop ids.
        max_rows: most rows decoded together.
        num_threads: CPU threads of this thread, or None.
        deliver: gets the results of a step, in the loop's thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        vocab_size: int,
        max_rows: int,
        num_threads: int | None = None,
        deliver: Callable[[list[Done]], None] | None = None,
    ) -> None:
        self.decoder, self.device, self.vocab_size, self.num_threads = decoder, device, vocab_size, num_threads
        self.deliver = deliver or resolve_futures
        self.rows = Rows(max_rows)
        self.waiting: deque[Pending] = deque()
        self.version = 0
        self.error: BaseException | None = None
        self.counters = dict.fromkeys(
            ("generated_tokens", "prefill_tokens", "shared_prefill_tokens", "decode_steps", "finished", "busy"), 0.0
        )
        self._condition = threading.Condition()
        self._paused = self._stopping = self._stepping = self._idle = False
        self._cancellations = False
        self._done: list[Done] = []
        self._fixed: _FixedParams | None = None
        self._fixed_key: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="areal-local", daemon=True)
        self._threads_set = threading.Event()
        threads = torch.get_num_threads()
        self._thread.start()
        self._threads_set.wait()
        # torch also takes a thread's setting for the threads to come; those are not ours.
        torch.set_num_threads(threads)

    # ------------------------------------------------------------------------------- called from other threads

    def submit(self, pending: Pending) -> None:
        self.submit_all((pending,))

    def submit_all(self, requests: Sequence[Pending]) -> None:
        """Queue requests; those of one call enter together, as far as there is room."""
        with self._condition:
            if self.error is not None:
                raise self.error
            if self._stopping:
                raise ArealError("the engine was destroyed; no request can start")
            self.waiting.extend(requests)
            if self._idle:
                self._condition.notify_all()

    def cancel(self, pending: Pending) -> None:
        with self._condition:
            pending.cancelled = self._cancellations = True
            if self._idle:
                self._condition.notify_all()

    def pause(self) -> None:
        """Returns when no token is being computed."""
        with self._condition:
            self._paused = True
            while self._stepping:
                self._condition.wait()

    def resume(self) -> None:
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No token is computed inside; whether it was paused is as before afterwards."""
        with self._condition:
            was_paused = self._paused
        self.pause()
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def invalidate(self) -> None:
        """Recompute keys and values of all running rows before their next token. Call inside ``exclusive``."""
        for row, pending in enumerate(self.rows.requests):
            if pending is not None:
                self.rows.fresh[row] = True

    def weights_changed(self, *, keep_kv: bool) -> None:
        """The model has other weights, or they lie elsewhere. Call inside ``exclusive``."""
        self.decoder.weights_changed()
        if not keep_kv:
            self.invalidate()

    def stop(self) -> None:
        """End every request with what it has (``abort``) and join the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self.num_threads is not None:
                torch.set_num_threads(self.num_threads)
            self._threads_set.set()
            with torch.inference_mode():
                while self._wait_for_work():
                    started = time.perf_counter()
                    self._step()
                    self.counters["busy"] += time.perf_counter() - started
                    self._deliver()
            self._end(None)
        except BaseException as error:
            _logger.exception("generation failed")
            self._end(error)

    def _wait_for_work(self) -> bool:
        with self._condition:
            self._stepping = False
            self._condition.notify_all()
            while True:
                if self._stopping:
                    return False
                if self._cancellations:
                    self._drop_cancelled()
                if not self._paused and (self.waiting or self.rows.running):
                    self._stepping = True
                    return True
                self._idle = True
                self._condition.wait()
                self._idle = False

    def _drop_cancelled(self) -> None:
        self._cancellations = False
        if any(pending.cancelled for pending in self.waiting):
            self.waiting = deque(pending for pending in self.waiting if not pending.cancelled)
        for row, pending in enumerate(self.rows.requests):
            if pending is not None and pending.cancelled:
                self.rows.remove(row)

    def _end(self, error: BaseException | None) -> None:
        with self._condition:
            self._stopping = True
            self.error = error
            self._stepping = False
            left = [(row, pending) for row, pending in enumerate(self.rows.requests) if pending is not None]
            waiting, self.waiting = self.waiting, deque()
            self._condition.notify_all()
        for row, pending in left:
            self._done.append((pending, error or self.rows.response(row, "abort")))
        for pending in waiting:
            self._done.append((pending, error or pending.response([], [], [], "abort")))
        self.rows = Rows(1)
        self._deliver()
        self.decoder.clear()

    def _step(self) -> None:
        version = self.version
        self._fill_rows()
        rows = self.rows
        if not rows.count:
            return
        fresh = np.flatnonzero(rows.fresh[: rows.count])
        if len(fresh):
            logits = self._prefill(fresh)
            self._sample(logits, fresh, version)
        else:
            everyone = np.arange(rows.count)
            logits = self.decoder.decode(rows.last[: rows.count], rows.length[: rows.count] - 1)
            self.counters["decode_steps"] += 1
            self._sample(logits, everyone, version)

    def _fill_rows(self) -> None:
        rows = self.rows
        with self._condition:
            room = rows.room
            entering: list[Pending] = []
            while self.waiting and len(entering) < room:
                pending = self.waiting.popleft()
                if not pending.cancelled:
                    entering.append(pending)
        # Rows of like length side by side make attention cheap; later ones fill the holes of those that ended.
        for pending in sorted(entering, key=lambda pending: -len(pending.request.input_ids)):
            rows.add(pending)
        if rows.holes:
            sources, targets = rows.compact()
            if sources:
                self.decoder.move(sources, targets, int(rows.length[targets].max()))

    def _prefill(self, fresh: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits ``[len(fresh), V]``; equal sequences are computed once."""
        requests = self.rows.requests
        groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for row in fresh.tolist():
            # Requests with the same images share one mapping, see vision.ImageReader.
            images = requests[row].images  # type: ignore[union-attr]
            groups.setdefault((tuple(self.rows.sequence(row)), id(images) if images else 0), []).append(row)
        sequences, members = [sequence for sequence, _ in groups], list(groups.values())
        seen = [requests[group[0]].images for group in members]  # type: ignore[union-attr]
        total = int(self.rows.length[fresh].sum())
        computed = sum(map(len, sequences))
        self.counters["prefill_tokens"] += computed
        self.counters["shared_prefill_tokens"] += total - computed
        # Room for what is likely to come saves growing the cache step by step.
        left = np.minimum(self.rows.max_out[fresh] - self.rows.generated[fresh], _ROOM)
        capacity = int((self.rows.length[fresh] + left).max())
        given = {"images": seen} if any(seen) else {}  # only to a decoder that reads them
        logits = self.decoder.prefill(sequences, members, capacity, **given)
        self.rows.fresh[fresh] = False
        if len(sequences) == len(fresh):
            return logits
        source = {row: i for i, group in enumerate(members) for row in group}
        return logits[torch.tensor([source[row] for row in fresh.tolist()], device=logits.device)]

    def _tensor(self, array: npt.NDArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _params(self, index: npt.NDArray[np.int64]) -> SamplingParams:
        rows = self.rows
        # What does not change from token to token is looked up once, until rows enter, leave or move.
        key = (rows.changes, len(index), int(index[0]), int(index[-1]))
        if key != self._fixed_key:
            self._fixed, self._fixed_key = _FixedParams(self, index), key
        fixed = self._fixed
        assert fixed is not None
        params = copy.copy(fixed.params)
        params.uniforms = self._tensor(fast_uniform(self.device, fixed.streams, rows.length[index]))
        if len(fixed.penalised):
            penalised = fixed.penalised
            counts = rows.generated[index[penalised]]
            tokens = np.concatenate([rows.out_tokens[index[i], : rows.generated[index[i]]] for i in penalised])
            where: npt.NDArray[np.int64] = np.repeat(penalised, counts)
            amounts = rows.penalty[index[where]]
            params.penalties = (self._tensor(where), self._tensor(tokens), self._tensor(amounts))
        if fixed.some_minimum:
            early = np.flatnonzero(rows.generated[index] < rows.min_out[index])
            table = rows.stop_ids[index[early]]
            where, column = np.nonzero((table >= 0) & (table < self.vocab_size))
            if len(where):
                params.banned = (self._tensor(early[where]), self._tensor(table[where, column]))
        return params

    def _sample(self, logits: torch.Tensor, index: npt.NDArray[np.int64], version: int) -> None:
        """Sample a token for the rows ``index`` from logits ``[len(index), V]``; retire rows that end."""
        params = self._params(index)
        ids, values, kept = _draw(logits, params)
        if not np.isfinite(values).all():
            raise ArealError("the model gave logits that are not finite (NaN or infinite); its weights are broken")
        rows = self.rows
        first = rows.generated[index] == 0
        if first.any():
            now = time.perf_counter()
            for row in index[first].tolist():
                rows.requests[row].first_token = now  # type: ignore[union-attr]
        rows.append(index, ids, values, version)
        if kept is not None:
            table = kept.int().cpu().numpy()
            for row, support in zip(index[rows.supports[index]].tolist(), table, strict=True):
                # A copy: a view would keep the whole step's table.
                rows.requests[row].supports.append(support[support >= 0])  # type: ignore[union-attr]
        self.counters["generated_tokens"] += len(index)
        generated = rows.generated[index]
        stopped = (rows.stop_ids[index] == ids[:, None]).any(axis=1)
        if rows.strings[index].any():
            for i in np.flatnonzero(rows.strings[index] & ~stopped & (generated >= rows.min_out[index])).tolist():
                try:
                    stopped[i] = self._ends_with_stop_string(int(index[i]))
                except Exception as error:  # a request's own tokenizer must not take the others down
                    self._fail(int(index[i]), error)
        ended = stopped | (generated >= rows.max_out[index])
        for i in np.flatnonzero(ended).tolist():
            if rows.requests[index[i]] is not None:
                self._finish(int(index[i]), "stop" if stopped[i] else "length")

    def _ends_with_stop_string(self, row: int) -> bool:
        pending = self.rows.requests[row]
        assert pending is not None
        strings = pending.request.gconfig.stop
        # A token holds at least one byte of text, so a new match lies within as many tokens as the string has bytes;
        # a few more make sure that the window does not start inside a character.
        size = max(len(string.encode()) for string in strings) + 8
        tail = self.rows.out_tokens[row, max(0, self.rows.generated[row] - size) : self.rows.generated[row]].tolist()
        text = pending.tokenizer.decode(tail, skip_special_tokens=False)
        before = pending.tokenizer.decode(tail[:-1], skip_special_tokens=False)
        return any(text.count(string) > before.count(string) for string in strings)

    def _finish(self, row: int, reason: StopReason) -> None:
        pending = self.rows.requests[row]
        assert pending is not None
        self._done.append((pending, self.rows.response(row, reason)))
        self.rows.remove(row)
        self.counters["finished"] += 1

    def _fail(self, row: int, error: Exception) -> None:
        pending = self.rows.requests[row]
        assert pending is not None
        self._done.append((pending, error))
        self.rows.remove(row)

    def _deliver(self) -> None:
        if self._done:
            done, self._done = self._done, []
            self.deliver(done)


class _FixedParams:
    """What sampling needs of the rows ``index`` and stays the same from token to token."""

    def __init__(self, loop: GenerationLoop, index: npt.NDArray[np.int64]) -> None:
        rows, tensor = loop.rows, loop._tensor
        self.streams = streams(rows.seed[index])
        self.penalised = np.flatnonzero(rows.penalty[index])
        self.some_minimum = bool((rows.min_out[index] > 0).any())
        self.params = params = SamplingParams(uniforms=_NONE)
        temperature, greedy = rows.temperature[index], rows.greedy[index]
        if (temperature != 1).any():
            params.temperature = tensor(temperature)
        if greedy.any():
            params.greedy = tensor(greedy)
            params.all_greedy = bool(greedy.all())
        top_k, top_p, min_p = rows.top_k[index], rows.top_p[index], rows.min_p[index]
        if (top_k > 0).any():
            params.top_k, params.max_top_k = tensor(top_k), int(top_k.max())
        if (top_p < 1).any():
            params.top_p, params.nucleus = tensor(top_p), tensor(np.flatnonzero(top_p < 1))
        if (min_p > 0).any():
            params.min_p = tensor(min_p)
        supports = np.flatnonzero(rows.supports[index])
        if len(supports):
            params.supports = tensor(supports)


def _draw(
    logits: torch.Tensor, params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], torch.Tensor | None]:
    """Ids and log-probs ``[B]``, and what was kept of the rows that give supports."""
    kernels = kernels_for(logits.device, logits.dtype) if params.plain else None
    if kernels is not None:
        return *sample_plain(kernels, logits, params.temperature, params.greedy, params.uniforms), None
    *drawn, kept = sample_from_candidates(logits, params)
    ids, values, complete = _to_host(*drawn)
    if not complete:
        *drawn, kept = sample_from_candidates(logits, params, candidates=None)
        ids, values, _ = _to_host(*drawn)
    return ids, values, kept


def _to_host(
    tokens: torch.Tensor, logprobs: torch.Tensor, complete: torch.Tensor | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], bool]:
    """The one synchronisation with the device: an id up to 2^53 and an fp32 number are exact in a double."""
    columns = [tokens.double(), logprobs.double()]
    if complete is not None:
        columns.append(complete.double().expand(len(tokens)))
    found = torch.stack(columns).cpu().numpy()
    return found[0].astype(np.int64), found[1].astype(np.float32), complete is None or bool(found[2, 0])


def resolve_futures(done: list[Done]) -> None:
    """Hand results to the event loops of their callers, once per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Done]] = {}
    for item in done:
        by_loop.setdefault(item[0].loop, []).append(item)
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, items)
        except RuntimeError:
            _logger.debug("the event loop of %d requests is closed", len(items))


def _resolve(items: list[Done]) -> None:
    for pending, result in items:
        if pending.future.done():
            continue
        if isinstance(result, BaseException):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
