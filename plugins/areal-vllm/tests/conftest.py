"""Fake servers, and engines over them that end with the test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import ModelResponse

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import EOS, FakeServer, make_request

from areal_vllm.config import VLLMConfig
from areal_vllm.engine import VLLMEngine


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """``serve(**options of FakeServer)``."""
    servers: list[FakeServer] = []

    def make(**options: Any) -> FakeServer:
        servers.append(FakeServer(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., VLLMEngine]]:
    """``connect(server, ..., rollout={}, **options)``: an engine over these servers."""
    engines: list[VLLMEngine] = []

    def make(*servers: FakeServer, rollout: dict[str, Any] | None = None, **options: Any) -> VLLMEngine:
        # No look at the servers' health unless something failed: each test has its own order of events.
        defaults = {"health_interval": 3600.0, "connect_timeout": 2.0, "wait_for_server": 5.0}
        config = InferenceEngineConfig(
            backend="vllm",
            plugin_options={"vllm": VLLMConfig(**{**defaults, **options})},
            **{"addresses": [server.address for server in servers], "setup_timeout": 10.0, **(rollout or {})},
        )
        engines.append(VLLMEngine(config))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
        engines[-1].initialize(str(tmp_path))
        return engines[-1]

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def ask() -> Callable[..., ModelResponse]:
    """``ask(engine, prompt, rid=..., metadata=..., **gconfig fields)``: one completion."""

    def run(engine: VLLMEngine, prompt: list[int], **fields: Any) -> ModelResponse:
        return asyncio.run(engine.agenerate(make_request(prompt, **fields)))

    return run
