"""OpenAI clients that reach a session in this process: no socket, no server."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from areal_core.errors import BadInputError
from areal_core.rollout.agents.errors import APIError, no_session
from areal_core.rollout.agents.session import AgentSession

# A reserved name (RFC 2606): a client without our transport cannot reach anybody with it.
_HOST = "http://areal.invalid"
_NO_RETRY = {"x-should-retry": "false"}


@attrs.frozen(kw_only=True)
class Access:
    """What an agent reaches its session with.

    Attributes:
        client: an ``openai.AsyncOpenAI``.
        base_url, api_key, http_client: for libraries that make their own ``openai.AsyncOpenAI``; they need all three.
    """

    client: Any
    base_url: str
    api_key: str
    http_client: Any


def import_openai(workflow: str) -> Any:
    """The package ``openai``.

    Raises:
        BadInputError: saying what to install.
    """
    try:
        import openai
    except ImportError as error:
        raise BadInputError(
            f"workflow {workflow!r} is an agent that takes an OpenAI client, and the package openai cannot be imported "
            f"({error}). Install it with: pip install 'areal-core[agents]'"
        ) from error
    return openai


class AgentClients:
    """One HTTP client for all sessions of a workflow; the path of a request says whose it is.

    Args:
        workflow: its name, for messages.
    """

    def __init__(self, workflow: str) -> None:
        openai = import_openai(workflow)
        http = _http_library(openai)
        self._sessions: dict[str, AgentSession] = {}
        self.http_client = _shared_client(http, _SessionTransport(self._sessions, http))
        self._client = openai.AsyncOpenAI(
            api_key="in-process", base_url=f"{_HOST}/v1", http_client=self.http_client, max_retries=0
        )

    @contextmanager
    def open(self, session: AgentSession) -> Iterator[Access]:
        """Inside, requests under the ``base_url`` reach ``session``; afterwards they are answered with 404."""
        name = uuid.uuid4().hex
        base_url = f"{_HOST}/{name}/v1"
        self._sessions[name] = session
        try:
            client = self._client.with_options(base_url=base_url)
            yield Access(client=client, base_url=base_url, api_key="in-process", http_client=self.http_client)
        finally:
            del self._sessions[name]


def _http_library(openai: Any) -> Any:
    """The module whose AsyncClient ``openai`` uses: httpx, or since openai 3 its successor httpx2."""
    base = next(cls for cls in openai.DefaultAsyncHttpxClient.__mro__ if cls.__name__ == "AsyncClient")
    return sys.modules[base.__module__.partition(".")[0]]


def _shared_client(http: Any, transport: _SessionTransport) -> Any:
    """An AsyncClient that an agent may close, as it should with a client of its own, without closing it for others."""

    class SharedAsyncClient(http.AsyncClient):
        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def aclose(self) -> None:
            pass

    # Nothing from the environment: a proxy there is not meant for us.
    return SharedAsyncClient(transport=transport, trust_env=False)


class _SessionTransport:
    """An ``AsyncBaseTransport`` that answers ``POST .../SESSION/v1/chat/completions`` and ``GET .../models``."""

    def __init__(self, sessions: Mapping[str, AgentSession], http: Any) -> None:
        self._sessions, self._http = sessions, http

    async def __aenter__(self) -> _SessionTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing to close."""

    async def handle_async_request(self, request: Any) -> Any:
        try:
            return await self._answer(request)
        except APIError as error:
            return self._http.Response(error.status, headers=_NO_RETRY, json=error.body())

    async def _answer(self, request: Any) -> Any:
        name, _, route = request.url.path.removeprefix("/").partition("/v1/")
        session = self._sessions.get(name)
        if session is None:
            raise no_session()
        if (request.method, route) == ("GET", "models"):
            return self._http.Response(200, json=session.models())
        if (request.method, route) != ("POST", "chat/completions"):
            message = f"{request.method} /v1/{route} is not served; POST /v1/chat/completions and GET /v1/models are"
            raise APIError(message, status=404, code="unknown_route")
        try:
            body = json.loads(await request.aread())
        except ValueError as error:
            raise APIError(f"the body is not JSON: {error}", code="invalid_json") from error
        answer = await session.create(body)
        if isinstance(answer, dict):
            content = json.dumps(answer).encode()
            return self._http.Response(200, headers={"content-type": "application/json"}, content=content)
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer]
        content = "".join([*events, "data: [DONE]\n\n"]).encode()
        return self._http.Response(200, headers={"content-type": "text/event-stream"}, content=content)
