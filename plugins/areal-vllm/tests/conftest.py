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


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a tokenizer, for the real server below."""
    from real_servers import save_model, save_tokenizer

    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    return save_model(path)


@pytest.fixture(scope="session")
def real_started(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One real server for all tests that leave it as it was: starting one takes longer than they do together."""
    from real_servers import start_engine

    engine = start_engine("vllm:d1", real_model, log_dir=tmp_path_factory.mktemp("logs"), stream_interval=3)
    yield engine
    engine.destroy()


@pytest.fixture(scope="session", params=["generate", "completions"])
def real_engine(request: pytest.FixtureRequest, real_started: VLLMEngine, real_model: str) -> Iterator[VLLMEngine]:
    """Over either way to generate; the second as one that connects to a server which it has not started."""
    if request.param == "generate":
        yield real_started
        return
    from real_servers import start_engine

    addresses = [replica.address for replica in real_started.fleet.live]
    engine = start_engine("vllm", real_model, addresses=addresses, transport="completions", stream_interval=None)
    yield engine
    engine.destroy()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One file after the other: pytest groups tests by parameters over files, and would start each server twice."""
    if items and all(item.get_closest_marker("vllm") for item in items):
        items.sort(key=lambda item: str(item.path))
