"""A server that speaks as vLLM does (the wire shapes of 0.32), over a toy model whose log-probs a test can compute.

It runs in a thread of the test. Tests break it in the ways that real servers break.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from aiohttp import web

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest

VOCAB = 32
EOS = 31
CONTEXT = 64


def make_request(prompt: list[int], **fields: Any) -> ModelRequest:
    """A request of which any of its fields, and of its sampling options, may be given."""
    request = {name: fields.pop(name) for name in ("metadata", "tokenizer", "image_data") if name in fields}
    defaults = {"max_new_tokens": 8, "ignore_eos": True, "seed": 7}
    return ModelRequest(input_ids=prompt, gconfig=GenerationHyperparameters(**{**defaults, **fields}), **request)


def logits_of(weights: str, tokens: list[int]) -> np.ndarray:
    """Logits ``[VOCAB]`` after ``tokens``: fixed noise by the weights, and by the last three tokens.

    The weights ``flat`` find all tokens equally likely.
    """
    if weights == "flat":
        return np.zeros(VOCAB)
    seed = [sum(map(ord, weights)) % 2**31, *tokens[-3:]]
    return np.random.default_rng(seed).normal(0.0, 1.5, VOCAB)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class FakeServer:
    """One server.

    Args:
        scale_out: whether it has ``/inference/v1/generate``.
        dev_mode: whether it can be paused and its weights be labelled.
        logprobs_mode: vLLM's flag.
        openapi: whether it describes its routes.

    Attributes:
        log: (path, query, body) of each request it got.
        weights: of the toy model; set by ``reload_weights``.
        other_models: names that requests may carry beside the model's.
        kept: for each token that it made, the ids from which it was drawn.
        budget: tokens that it may still generate before it stands still; None: no limit.
        faults: what happens to the next generate requests, one each: ``("status", 500)``, ``("break", n)`` closes the
            connection after ``n`` tokens, ``("close",)`` before any, ``("truncate",)`` ends the stream without its end.
    """

    def __init__(
        self,
        *,
        scale_out: bool = True,
        dev_mode: bool = True,
        logprobs_mode: str = "processed_logprobs",
        openapi: bool = True,
        model: str = "toy",
        context: int = CONTEXT,
    ) -> None:
        self.scale_out, self.dev_mode, self.mode, self.openapi = scale_out, dev_mode, logprobs_mode, openapi
        self.model, self.context = model, context
        self.log: list[tuple[str, dict[str, str], Any]] = []
        self.weights, self.label = "start", "default"
        self.budget: int | None = None
        self.faults: list[tuple[Any, ...]] = []
        self.health = 200
        self.generated = 0
        self.kept: list[set[int]] = []
        self.other_models: set[str] = set()
        self.most_running = self.running = 0
        self._aborts: set[asyncio.Event] = set()
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = 0
        self.call(self._prepare())
        self.start()

    # -------------------------------------------------------------------------------------- for the tests

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def start(self) -> None:
        """Listen; again on the same port after ``kill``, with the weights that it was first loaded with."""
        self.call(self._start())

    def kill(self) -> None:
        """As by kill -9: every connection breaks at once."""
        self.call(self._kill())

    def close(self) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def allow(self, tokens: int | None) -> None:
        """Generate so many more tokens; None: as many as asked for."""

        async def change() -> None:
            self.budget = None if tokens is None else (self.budget or 0) + tokens
            async with self._changed:
                self._changed.notify_all()

        self.call(change())

    def wait_for(self, condition: Any) -> None:
        """Until ``condition()`` holds; it is looked at after each event of the server."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        self.call(wait())

    def bodies(self, path: str = "/inference/v1/generate") -> list[Any]:
        return [body for where, _, body in self.log if where == path]

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.log]

    # -------------------------------------------------------------------------------------- life

    async def _prepare(self) -> None:
        self._changed = asyncio.Condition()
        self._paused = False

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._note])
        get, post = app.router.add_get, app.router.add_post
        get("/health", self._health)
        get("/version", _fixed(lambda: {"version": "0.0.fake"}))
        get("/v1/models", self._models)
        post("/v1/completions", self._completions)
        post("/v1/load_lora_adapter", self._load_adapter)
        if self.scale_out:
            post("/inference/v1/generate", self._generate)
        if self.dev_mode:
            post("/pause", self._pause)
            post("/resume", self._resume)
            get("/is_paused", _fixed(lambda: {"is_paused": self._paused}))
            post("/abort_requests", _fixed(lambda: {"status": "aborted"}))
            post("/update_weight_version", self._set_label)
            get("/weight_info", _fixed(lambda: {"weight_version": self.label}))
            post("/reset_prefix_cache", _fixed(lambda: {"success": True}))
            post("/collective_rpc", self._rpc)
        self._more_routes(get, post)
        if self.openapi:
            paths = {route.resource.canonical: {} for route in app.router.routes()}
            get("/openapi.json", _fixed(lambda: {"paths": paths}))
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._paused, self.weights, self.label, self.running = False, "start", "default", 0
        self.other_models.clear()

    def _more_routes(self, get: Any, post: Any) -> None:
        """For servers that can do more."""

    async def _kill(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        text = await request.text()
        self.log.append((request.path, dict(request.query), json.loads(text) if text else None))
        async with self._changed:
            self._changed.notify_all()
        return await handler(request)

    # -------------------------------------------------------------------------------------- control

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "root": "/models/toy", "max_model_len": self.context}
        return await _json({"object": "list", "data": [card]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        return web.Response(text=f"Success: LoRA adapter '{(await request.json())['lora_name']}' added successfully.")

    async def _pause(self, request: web.Request) -> web.Response:
        self._paused = True
        if request.query.get("mode", "abort") == "abort":
            for event in self._aborts:
                event.set()
        async with self._changed:
            self._changed.notify_all()
        return await _json({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._paused = False
        async with self._changed:
            self._changed.notify_all()
        return await _json({"status": "resumed"})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return await _json({"success": True, "new_version": self.label})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.weights = str(body["kwargs"]["weights_path"])
        return await _json({"results": [None]})

    # -------------------------------------------------------------------------------------- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body["sampling_params"]
        if params.get("stop") and params.get("detokenize") is False:
            return _error(400, "stop strings are only supported when detokenize is True.")

        def choice(new: list[tuple[int, float, dict[int, float]]], finish: str | None, spans: Any) -> dict[str, Any]:
            content = [
                {
                    "token_id": token,
                    "logprob": value,
                    "rank": 1,
                    "top_logprobs": [{"token_id": t, "logprob": v, "rank": None} for t, v in top.items()],
                }
                for token, value, top in new
            ]
            return {
                "index": 0,
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": [token for token, _, _ in new],
                "logprobs": {"content": content} if "logprobs" in params else None,
                "weight_versions": spans if finish else None,
            }

        return await self._answer(request, body, params, body["token_ids"], choice)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def choice(new: list[tuple[int, float, dict[int, float]]], finish: str | None, spans: Any) -> dict[str, Any]:
            return {
                "index": 0,
                "text": "",
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": [token for token, _, _ in new] if body.get("return_token_ids") else None,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token, _, _ in new],
                    "token_logprobs": [value for _, value, _ in new],
                    "top_logprobs": [{f"token_id:{t}": v for t, v in top.items()} for _, _, top in new],
                }
                if "logprobs" in body
                else None,
            }

        return await self._answer(request, body, body, body["prompt"], choice)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], params: dict[str, Any], prompt: list[int], choice: Any
    ) -> web.StreamResponse:
        if body.get("model") not in (self.model, *self.other_models):
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if len(prompt) + params["max_tokens"] > self.context:
            return _error(400, f"This model's maximum context length is {self.context} tokens.")
        fault = self.faults.pop(0) if self.faults and params["max_tokens"] > 2 else None
        if fault is not None and fault[0] == "status":
            return _error(fault[1], "the engine is not well")
        if fault is not None and fault[0] == "close":
            request.transport.close()
            return web.Response()
        break_after = fault[1] if fault is not None and fault[0] == "break" else None
        stream, interval = body.get("stream", False), params.get("stream_interval", 1)
        response: web.StreamResponse | None = None
        if stream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
        abort = asyncio.Event()
        self._aborts.add(abort)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        async with self._changed:
            self._changed.notify_all()
        try:
            made: list[tuple[int, float, dict[int, float]]] = []
            spans: list[dict[str, Any]] = []
            sent = 0
            rng = np.random.default_rng(params.get("seed"))
            finish: str | None = None
            while finish is None:
                if not await self._turn(abort):
                    finish = "abort"
                    break
                made.append(self._sample([*prompt, *(m[0] for m in made)], params, rng, len(made)))
                if not spans or spans[-1]["version"] != self.label:
                    spans.append({"version": self.label, "start": len(made) - 1, "end": len(made)})
                spans[-1]["end"] = len(made)
                finish = _finish(made, params)
                if break_after is not None and len(made) >= break_after:
                    if stream and made[sent:]:
                        await _send(response, {"choices": [choice(made[sent:], None, None)]})
                    request.transport.close()
                    return response or web.Response()
                if stream and finish is None and (len(made) == 1 or len(made) - sent >= interval):
                    await _send(response, {"choices": [choice(made[sent:], None, None)]})
                    sent = len(made)
        finally:
            self.running -= 1
            self._aborts.discard(abort)
            async with self._changed:
                self._changed.notify_all()
        if not stream:
            return await _json({"request_id": body.get("request_id"), "choices": [choice(made, finish, spans)]})
        if fault is None or fault[0] != "truncate":
            await _send(response, {"choices": [choice(made[sent:], finish, spans)]})
            with contextlib.suppress(ConnectionError):
                await response.write(b"data: [DONE]\n\n")
        return response

    async def _turn(self, abort: asyncio.Event) -> bool:
        """Wait until a token may be made; False if the request is aborted meanwhile."""
        await asyncio.sleep(0)
        async with self._changed:
            await self._changed.wait_for(
                lambda: abort.is_set() or (not self._paused and (self.budget is None or self.budget > 0))
            )
            if abort.is_set():
                return False
            if self.budget is not None:
                self.budget -= 1
            self.generated += 1
            self._changed.notify_all()
        return True

    def _sample(
        self, tokens: list[int], params: dict[str, Any], rng: np.random.Generator, position: int
    ) -> tuple[int, float, dict[int, float]]:
        """A token, its log-prob by the server's mode, and the likeliest ones."""
        raw = logits_of(self.weights, tokens)
        logits = raw.copy()
        if position < params.get("min_tokens", 0):
            logits[[EOS, *params.get("stop_token_ids", [])]] = -np.inf
        temperature = params["temperature"]
        if temperature > 0:
            logits = logits / temperature
            logits[logits < logits.max() + np.log(params.get("min_p", 0) or 1e-300)] = -np.inf
            if 0 < params.get("top_k", 0) < VOCAB:
                logits[np.argsort(-logits)[params["top_k"] :]] = -np.inf
            if params.get("top_p", 1.0) < 1:
                order = np.argsort(logits)
                probs = np.exp(log_softmax(logits))[order]
                dropped = np.cumsum(probs) <= 1 - params["top_p"]
                dropped[-1] = False
                logits[order[dropped]] = -np.inf
            token = int(np.argmax(logits + rng.gumbel(size=VOCAB)))
        else:
            token = int(np.argmax(logits))
        with np.errstate(divide="ignore"):
            shown = {
                "raw_logprobs": lambda: log_softmax(raw),
                "raw_logits": lambda: raw,
                "processed_logprobs": lambda: log_softmax(logits),
                "processed_logits": lambda: logits,
                # What the plugin makes of the servers that it starts.
                "framework": lambda: log_softmax(raw / (temperature or 1.0)),
            }[self.mode]()
        self.kept.append(set(np.flatnonzero(np.isfinite(logits)).tolist()))
        shown = np.maximum(shown, -9999.0)
        top = np.argsort(-shown)[: params.get("logprobs", 0)]
        return token, float(shown[token]), {int(t): float(shown[t]) for t in top}


def _finish(made: list[tuple[int, float, dict[int, float]]], params: dict[str, Any]) -> str | None:
    token = made[-1][0]
    if len(made) > params.get("min_tokens", 0):
        if token in params.get("stop_token_ids", []):
            return "stop"
        if token == EOS and not params.get("ignore_eos"):
            return "stop"
    return "length" if len(made) >= params["max_tokens"] else None


def _fixed(value: Callable[[], Any]) -> Any:
    async def handler(_: web.Request) -> web.Response:
        return await _json(value())

    return handler


async def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "Error", "param": None, "code": status}}, status=status
    )


async def _send(response: Any, value: Any) -> None:
    with contextlib.suppress(ConnectionError):
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")
