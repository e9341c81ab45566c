"""One pooled HTTP client for all servers, and what can go wrong with a call."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from areal_core.errors import ArealError, BadInputError

_MOST_TEXT = 600
#: Below the 5 s after which vLLM closes an idle connection, so that no request meets one that is being closed.
_KEEP_ALIVE = 4.0


class ServerGone(ArealError):
    """A server did not answer, or broke off in the middle: another may be asked."""


class ServerError(ArealError):
    """A server answered that it failed (5xx, or 429): another may be asked."""


class RequestRefused(BadInputError):
    """A server answered that the request is wrong (4xx): no server will take it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """JSON over HTTP to servers named ``host:port`` or by a URL. Lives in one event loop.

    Args:
        max_connections: most of them to one server for generation; further requests wait. Other calls never do.
        connect_timeout: seconds until a connection must stand.
        api_key: sent as a bearer token.
    """

    def __init__(self, *, max_connections: int, connect_timeout: float, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None

        def session(limit: int) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=limit, keepalive_timeout=_KEEP_ALIVE)
            # Proxies of the environment are for the way out, not for the servers of a run.
            return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)

        self._generation, self._control = session(max_connections), session(0)
        self._connect_timeout = connect_timeout

    async def close(self) -> None:
        await self._generation.close()
        await self._control.close()

    async def get(self, address: str, path: str, *, params: dict[str, str] | None = None, timeout: float) -> Any:
        return await self.call("GET", address, path, params=params, timeout=timeout)

    async def post(
        self, address: str, path: str, *, body: Any = None, params: dict[str, str] | None = None, timeout: float
    ) -> Any:
        return await self.call("POST", address, path, body=body, params=params, timeout=timeout)

    async def generate(self, address: str, path: str, *, body: Any, timeout: float) -> Any:
        """POST as one of the connections for generation."""
        return await self._call(self._generation, "POST", address, path, body, None, timeout)

    async def call(
        self,
        method: str,
        address: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, str] | None = None,
        timeout: float,
    ) -> Any:
        """The decoded answer; None where it is empty, text where it is not said to be JSON.

        Raises:
            ServerGone: no connection, a broken one, no answer in time, or broken JSON.
            ServerError, RequestRefused: by its status.
        """
        return await self._call(self._control, method, address, path, body, params, timeout)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        address: str,
        path: str,
        body: Any,
        params: dict[str, str] | None,
        timeout: float,
    ) -> Any:
        async with self._answer(session, method, address, path, body, params, timeout) as response:
            data = await response.read()
            is_json = response.content_type == "application/json"
        if not data:
            return None
        if not is_json:
            return data.decode("utf-8", "replace")
        try:
            return json.loads(data)
        except ValueError as error:
            raise ServerGone(f"{address}{path} answered with broken JSON: {_text(data)}") from error

    async def stream(
        self, address: str, path: str, *, body: Any, timeout: float, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        """Generate: hand over the events of a server-sent stream as they come, decoded, up to ``[DONE]``.

        Raises:
            as ``call``; ServerGone also if the stream ends before ``[DONE]``.
        """
        async with self._answer(self._generation, "POST", address, path, body, None, timeout) as response:
            rest = b""
            while chunk := await response.content.readany():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data:"):
                        continue
                    text = event[5:].strip()
                    if text == b"[DONE]":
                        # To its end, so that the connection can be used again.
                        await response.read()
                        return
                    on_event(_event(address, path, text))
        raise ServerGone(f"{address}{path} ended its answer in the middle")

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        session: aiohttp.ClientSession,
        method: str,
        address: str,
        path: str,
        body: Any,
        params: dict[str, str] | None,
        timeout: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request, when its head has come; failures within are those of ``call``."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout)
        data, headers = None, None
        if body is not None:
            data, headers = json.dumps(body, separators=(",", ":")).encode(), {"Content-Type": "application/json"}
        url = base_url(address) + path
        try:
            async with session.request(
                method, url, data=data, headers=headers, params=params, timeout=limits
            ) as response:
                if response.status >= 400:
                    raise _refusal(address, path, response.status, await response.read())
                yield response
        except _FAILURES as error:
            raise ServerGone(_describe(address, path, error, timeout)) from error


#: What aiohttp raises when a connection fails; ``OSError`` is a socket's own, ``ValueError`` a malformed answer's.
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


def base_url(address: str) -> str:
    """``http://host:port`` of ``host:port``; a URL stays as it is."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/")


def _event(address: str, path: str, text: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(text)
    error = event.get("error")
    if error is not None:
        message = error.get("message", error) if isinstance(error, dict) else error
        code = error.get("code", 500) if isinstance(error, dict) else 500
        raise _refusal(address, path, code if isinstance(code, int) else 500, str(message).encode())
    return event


def _refusal(address: str, path: str, status: int, data: bytes) -> ArealError:
    said = f"{address}{path} answered {status}: {_message(data)}"
    if status >= 500 or status in (408, 425, 429):
        return ServerError(said)
    return RequestRefused(said, status)


def _message(data: bytes) -> str:
    """The text in a server's error, whichever of its shapes it has."""
    try:
        answer = json.loads(data)
    except ValueError:
        return _text(data)
    while isinstance(answer, dict):
        inner = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), None)
        if inner is None:
            break
        answer = inner
    return _text(str(answer).encode())


def _text(data: bytes) -> str:
    text = " ".join(data.decode("utf-8", "replace").split())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _describe(address: str, path: str, error: BaseException, timeout: float) -> str:
    where = f"{address}{path}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection to {address}: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection to {address}: it did not accept one in time"
    if isinstance(error, asyncio.TimeoutError):
        return f"{where} did not answer in {timeout:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return f"{where} closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return f"{where} broke off its answer"
    return f"{where}: {error or type(error).__name__}"
