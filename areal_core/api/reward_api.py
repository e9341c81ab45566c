"""Rewards: plain functions, run where they can neither block nor break the rollout."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Literal

from areal_core.api import reward_worker as worker
from areal_core.api.reward_pool import ProcessPool, Target
from areal_core.errors import ArealError

RewardErrorKind = Literal["raised", "timeout", "exited", "none", "nan", "inf", "type"]

KINDS: tuple[RewardErrorKind, ...] = ("raised", "timeout", "exited", "none", "nan", "inf", "type")

_CODES: Mapping[int, RewardErrorKind] = {
    worker.RAISED: "raised",
    worker.EXITED: "exited",
    worker.NONE: "none",
    worker.NAN: "nan",
    worker.INF: "inf",
    worker.TYPE: "type",
}
_POSITIONAL = frozenset(("prompt", "completions", "prompt_ids", "completion_ids"))


class Score(float):
    """A reward that is made of several named ones. A plain float for who only reads the number.

    ``Trajectory(reward=score)`` keeps the parts; arithmetic gives a plain float without them.

    Attributes:
        terms: each reward's own value by its label, unweighted, in the order of the configuration.
    """

    __slots__ = ("terms",)
    terms: dict[str, float]

    def __new__(cls, value: float, terms: Mapping[str, float] = MappingProxyType({})) -> Score:
        score = super().__new__(cls, value)
        score.terms = dict(terms)
        return score


class RewardError(ArealError):
    """A reward that gave no finite number.

    Attributes:
        kind: ``raised`` (an exception), ``timeout``, ``exited`` (``sys.exit``, or the process ended), ``none``,
            ``nan``, ``inf``, or ``type`` (a bool, str, list, tensor, ...).
    """

    def __init__(self, kind: RewardErrorKind, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class AsyncRewardWrapper:
    """Makes ``await reward(prompt, completions, prompt_ids, completion_ids, **data) -> float`` of a reward function.

    * An ``async def`` function is awaited in the event loop.
    * Any other function that can be imported by its name (also a ``functools.partial`` of one, with bound options that
      can be pickled) runs in ``max_workers`` processes of its own, started at the first call. A process that hangs,
      exits or crashes is replaced, and only the call that did it fails.
    * What cannot be imported (a lambda, a closure, a bound method, a function of ``__main__``) runs in ``max_workers``
      threads. A call that hangs there keeps its thread for good (a new one takes its place), and a call that crashes
      takes the program with it.

    The result must be a finite real number: an int, a float, or a numpy integer or float scalar. Anything else, bools
    included, raises ``RewardError`` and is counted in ``stats``. Columns that the function has no parameter for are not
    passed, unless it takes ``**kwargs``.

    Args:
        fn: the reward function. An ``AsyncRewardWrapper`` and what a run gives a workflow as ``reward_fn`` are used as
            they are, with their own ``timeout`` and so on.
        timeout: seconds for one call, waiting for a free process not included.
        max_workers: processes (or threads).
        name: for messages.
        key: the section of the configuration, for messages.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        timeout: float = 15.0,
        max_workers: int = 1,
        name: str = "reward",
        key: str = "reward",
    ) -> None:
        self.fn, self.timeout, self.max_workers, self.name, self.key = fn, timeout, max_workers, name, key
        self._errors: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._calls = 0
        self._seconds = 0.0
        self._inner: Any = fn if _is_wrapped(fn) else None
        self._is_async = self._inner is None and _is_coroutine_function(fn)
        self._target = None if self._inner is not None or self._is_async else import_target(fn)
        self._accepted, self._bound = (None, frozenset[str]()) if self._inner is not None else _keywords(fn)
        self._pool: ProcessPool | None = None
        self._threads: _Threads | None = None

    @property
    def runs_in(self) -> Literal["event loop", "process", "thread"]:
        """Where calls run."""
        if self._inner is not None:
            where: Literal["event loop", "process", "thread"] = getattr(self._inner, "runs_in", "event loop")
            return where
        if self._is_async:
            return "event loop"
        return "process" if self._target is not None else "thread"

    @property
    def stats(self) -> dict[str, int]:
        """Failed calls so far by kind; every kind is present."""
        if self._inner is not None:
            inner: dict[str, int] = self._inner.stats
            return inner
        return {kind: self._errors[kind] for kind in KINDS}

    def export_stats(self, prefix: str = "reward") -> dict[str, float]:
        """Since the last call of it: calls, mean seconds waited for one, failed calls by kind (those that occurred)."""
        if self._inner is not None:
            inner: dict[str, float] = self._inner.export_stats(prefix)
            return inner
        stats = {f"{prefix}/calls": float(self._calls), f"{prefix}/seconds": self._seconds / max(1, self._calls)}
        new_errors = self._errors - self._reported
        stats.update({f"{prefix}/errors/{kind}": float(count) for kind, count in sorted(new_errors.items())})
        self._calls, self._seconds, self._reported = 0, 0.0, self._errors.copy()
        return stats

    async def __call__(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **data: Any
    ) -> float:
        """Score one completion.

        Raises:
            RewardError: if the function gives no finite number.
            BadInputError: if a worker process cannot import the function.
        """
        if self._inner is not None:
            score: float = await self._inner(prompt, completions, prompt_ids, completion_ids, **data)
            return score
        args = (prompt, completions, prompt_ids, completion_ids)
        if self._accepted is not None:
            data = {key: value for key, value in data.items() if key in self._accepted}
        elif self._bound:
            data = {key: value for key, value in data.items() if key not in self._bound}
        start = time.perf_counter()
        self._calls += 1
        try:
            if self._is_async:
                return await self._await(args, data)
            code, value, message = await self._submit(args, data)
        except TimeoutError as error:
            raise self._error("timeout", f"took more than {self.timeout:g} s ({self.key}.timeout)") from error
        finally:
            self._seconds += time.perf_counter() - start
        if code == worker.OK:
            return value
        raise self._error(_CODES[code], message)

    def destroy(self) -> None:
        """End all processes. May be called twice and from any thread; a later call starts new ones."""
        if self._inner is not None:
            self._inner.destroy()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()

    def _error(self, kind: RewardErrorKind, message: str) -> RewardError:
        self._errors[kind] += 1
        return RewardError(kind, f"reward {self.name!r} {message}")

    async def _await(self, args: tuple[Any, ...], data: dict[str, Any]) -> float:
        try:
            async with asyncio.timeout(self.timeout) as scope:
                result = await self.fn(*args, **data)
        except SystemExit as error:
            raise self._error("exited", f"called sys.exit({error.code!r})") from error
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise
            raise self._error("raised", worker.describe_call(error)) from error
        code, value, message = worker.classify(result)
        if code != worker.OK:
            raise self._error(_CODES[code], message)
        return value

    def _submit(self, args: tuple[Any, ...], data: dict[str, Any]) -> asyncio.Future[tuple[int, float, str]]:
        loop = asyncio.get_running_loop()
        if self._target is None:
            if self._threads is None:
                self._threads = _Threads(self.fn, self.max_workers, self.timeout, self.name)
            return self._threads.submit(loop, args, data)
        if self._pool is None or self._pool.loop is not loop:
            if self._pool is not None:
                if self._pool.loop.is_running():
                    raise RuntimeError(f"reward {self.name!r} is used from two event loops at the same time")
                self._pool.close()
            self._pool = ProcessPool(loop, self._target, self.timeout, self.max_workers, self.name)
        try:
            payload = pickle.dumps((args, data), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise self._error("raised", f"cannot be sent its arguments: {worker.describe(error)}") from error
        return self._pool.submit(payload)


def awaitable_reward(fn: Callable[..., Any]) -> Any:
    """``fn`` where it can be awaited, else an ``AsyncRewardWrapper`` of it: what a workflow made by hand may be given.

    Who gave a plain function ends the processes of the wrapper with its ``destroy``; they also end with the program.
    """
    return fn if _is_coroutine_function(fn) else AsyncRewardWrapper(fn)


def _is_wrapped(fn: Any) -> bool:
    """Whether a reward judges and counts its own calls: another wrapper would only hide what it says."""
    if isinstance(fn, AsyncRewardWrapper):
        return True
    # By what it can do and not its class: the rewards of a run are made elsewhere.
    methods = all(callable(getattr(fn, name, None)) for name in ("export_stats", "destroy"))
    return methods and hasattr(fn, "stats") and _is_coroutine_function(fn)


def import_target(fn: Callable[..., Any]) -> Target | None:
    """How another process can import ``fn``; None where it cannot."""
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        args, keywords, fn = (*fn.args, *args), {**fn.keywords, **keywords}, fn.func
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or module == "__main__" or "<" in qualname:
        return None
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is not fn:
        return None
    try:
        bound = pickle.dumps((args, keywords), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return None
    return Target(module, qualname, getattr(sys.modules[module], "__file__", None), bound)


def _is_coroutine_function(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _keywords(fn: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """(columns it has parameters for, or None for all; names bound by a partial, which no column may replace)."""
    bound: set[str] = set()
    inner: Any = fn
    while isinstance(inner, functools.partial):
        bound |= inner.keywords.keys()
        inner = inner.func
    try:
        parameters = inspect.signature(inner).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset(bound)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None, frozenset(bound)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(names - bound - _POSITIONAL), frozenset(bound)


class _ThreadCall:
    """One call on its way through a thread; everything but ``replaced`` belongs to the event loop."""

    __slots__ = ("args", "data", "done", "future", "loop", "replaced", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, args: tuple[Any, ...], data: dict[str, Any]) -> None:
        self.loop, self.args, self.data = loop, args, data
        self.future: asyncio.Future[tuple[int, float, str]] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.done = self.replaced = False

    def finish(self, answer: tuple[int, float, str]) -> None:
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(answer)


class _Threads:
    """Daemon threads that run a function which no other process can import."""

    def __init__(self, fn: Callable[..., Any], size: int, timeout: float, name: str) -> None:
        self.fn, self.size, self.timeout, self.name = fn, size, timeout, name
        self.queue: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self.started = 0

    def submit(
        self, loop: asyncio.AbstractEventLoop, args: tuple[Any, ...], data: dict[str, Any]
    ) -> asyncio.Future[tuple[int, float, str]]:
        call = _ThreadCall(loop, args, data)
        if self.started < self.size:
            self._start()
        self.queue.put(call)
        return call.future

    def close(self) -> None:
        for _ in range(self.started):
            self.queue.put(None)
        self.started = 0

    def _start(self) -> None:
        self.started += 1
        threading.Thread(target=self._work, daemon=True, name=f"reward-{self.name}").start()

    def _work(self) -> None:
        while (call := self.queue.get()) is not None:
            try:
                call.loop.call_soon_threadsafe(self._watch, call)
                answer = worker.call(self.fn, call.args, call.data)
                call.loop.call_soon_threadsafe(call.finish, answer)
            except RuntimeError:  # the loop was closed: nobody waits
                continue
            if call.replaced:
                return

    def _watch(self, call: _ThreadCall) -> None:
        if not call.done:
            call.timer = call.loop.call_later(self.timeout, self._expire, call)

    def _expire(self, call: _ThreadCall) -> None:
        call.replaced = True
        self.started -= 1
        self._start()
        if not call.future.done():
            call.future.set_exception(TimeoutError())
