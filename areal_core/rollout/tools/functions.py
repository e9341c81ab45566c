"""Python functions as tools: their schemas, and calls that can neither block nor break the rollout."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_core.errors import BadInputError, did_you_mean
from areal_core.plugins.loading import import_path
from areal_core.rollout.tools.parsers import ParsedCall

_MOST_THREADS = 64


class ToolBox:
    """Functions that a model may call.

    A coroutine function is awaited in the event loop; any other runs in a daemon thread, of which at most 64 work at
    once. A call that takes too long is given up: the model gets an error, and the thread is left to itself.

    Args:
        functions: ``package.module:function`` of each. Its type hints and its docstring (Google style, with an
            ``Args:`` section) make the schema that the model sees.
        timeout: seconds for one call.
        key: the configuration key, for messages.

    Attributes:
        schemas: JSON Schemas for the chat template.
        stats: counts: ``calls``, ``errors`` (also those with unknown names or wrong arguments), ``timeouts``.

    Raises:
        BadInputError: if a function cannot be imported, has no schema, or two have one name.
    """

    def __init__(self, functions: Sequence[str], *, timeout: float, key: str) -> None:
        self.timeout = timeout
        self.stats: Counter[str] = Counter()
        self.schemas: list[dict[str, Any]] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        for path in functions:
            function = import_path(path, subject=key)
            schema = _schema(function, path, key)
            name = schema["function"]["name"]
            if name in self._functions:
                raise BadInputError(f"{key}: two tools are called {name!r}; the model could not tell them apart.")
            self._functions[name] = function
            self.schemas.append(schema)

    async def call(self, call: ParsedCall) -> str:
        """What the model is told: the result as text (JSON unless it is a str), or what went wrong."""
        self.stats["calls"] += 1
        function = self._functions.get(call.name)
        if function is None:
            known = ", ".join(self._functions)
            message = f"there is no tool {call.name!r}. Tools: {known}.{did_you_mean(call.name, self._functions)}"
            return self._error("errors", message)
        arguments = call.as_dict()
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return self._error("errors", f"{call.name}: {error}")
        try:
            async with asyncio.timeout(self.timeout) as limit:
                if inspect.iscoroutinefunction(function):
                    result = await function(**arguments)
                else:
                    result = await self._in_thread(function, arguments)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return self._error("timeouts", f"{call.name} took more than {self.timeout:g} s")
            return self._error("errors", f"{call.name}: {type(error).__name__}: {error}")

    def export_stats(self) -> dict[str, float]:
        """Since the last call: ``tools/calls``, ``tools/errors``, ``tools/timeouts``."""
        stats, self.stats = self.stats, Counter()
        return {f"tools/{name}": float(stats[name]) for name in ("calls", "errors", "timeouts")}

    def _error(self, kind: str, message: str) -> str:
        self.stats[kind] += 1
        return f"Error: {message}"

    async def _in_thread(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(_MOST_THREADS), loop
        future: asyncio.Future[Any] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result, failure = None, None
            try:
                result = function(**arguments)
            except BaseException as error:
                # SystemExit and StopIteration cannot be an exception of a future.
                failure = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
                failure = failure or RuntimeError(f"{type(error).__name__}: {error}")
            try:
                loop.call_soon_threadsafe(finish, result, failure)
            except RuntimeError:  # the loop was closed: nobody waits
                return

        async with self._slots:
            # A daemon of its own, and not the loop's executor: that one is waited for when the program ends.
            threading.Thread(target=work, name=f"tool-{function.__name__}", daemon=True).start()
            return await future


def _schema(function: Any, path: str, key: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    if not inspect.isfunction(function):
        raise BadInputError(f"{key}: {path} is a {type(function).__name__}, not a function.")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise BadInputError(
            f"{key}: {path} has no schema that a model could be shown: {error} A tool needs type hints, and a "
            "docstring with a line for each argument under `Args:`."
        ) from error
    return schema
