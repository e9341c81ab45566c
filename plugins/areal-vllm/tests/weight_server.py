"""A fake server with vLLM's routes for weights, and with or without the worker extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_server import FakeServer


class WeightServer(FakeServer):
    """Loads nothing; remembers what it was told.

    Args:
        extension: whether its workers have the methods of ``areal_vllm_worker``.
        workers: of the server.
        blind: whether its workers do not see the trainer's folders.
        broken: paths that it answers with 500.
    """

    def __init__(
        self, *, extension: bool = True, workers: int = 1, blind: bool = False, broken: tuple[str, ...] = ()
    ) -> None:
        self.extension, self.workers, self.blind, self.broken = extension, workers, blind, broken
        self.adapters: dict[str, int] = {}
        self.active = False
        super().__init__()

    def _more_routes(self, get: Any, post: Any) -> None:
        get("/get_world_size", self._world_size)
        for path in (
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        ):
            post(path, self._transfer)
        post("/v1/unload_lora_adapter", self._unload)

    async def _world_size(self, _: web.Request) -> web.Response:
        return _answer({"world_size": self.workers})

    async def _transfer(self, request: web.Request) -> web.Response:
        if request.path in self.broken:
            return _answer({"error": {"message": "Weight transfer not configured"}}, 500)
        if request.path == "/start_weight_update":
            self.active = True
        if request.path == "/finish_weight_update":
            self.active = False
        return _answer({"message": "done"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters and not body.get("load_inplace"):
            return _answer({"error": {"message": "The lora adapter has already been loaded"}}, 400)
        self.adapters.setdefault(body["lora_name"], 7 + len(self.adapters))
        return web.Response(text="Success: added")

    async def _unload(self, request: web.Request) -> web.Response:
        self.adapters.pop((await request.json())["lora_name"])
        return web.Response(text="Success: removed")

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method, kwargs = body["method"], body["kwargs"]
        if method.startswith("areal_") and not self.extension:
            return _answer({"error": {"message": f"Worker has no attribute {method!r}"}}, 500)
        result: Any = None
        if method == "areal_adapters":
            result = {"numbers": sorted(self.adapters.values())}
        elif method == "areal_find_weights":
            folder = Path("/nowhere" if self.blind else kwargs["path"])
            files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
            result = {"error": None if folder.is_dir() else "No such file or directory", "files": files}
        elif method in ("areal_reload", "reload_weights"):
            self.weights = kwargs.get("path") or kwargs["weights_path"]
        return _answer({"results": [result] * self.workers})


def _answer(body: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(body), status=status, content_type="application/json")
