"""Two real vLLM servers: one group for weights, and no request lost when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_servers import (
    check_against,
    disturb,
    exported,
    make_trainer,
    prompts,
    request,
    save_model,
    send,
    start_engine,
    tokens_so_far,
    until_generated,
    update_in_flight,
)

from areal_core.api.io_struct import WeightUpdateMeta

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = start_engine("vllm:d2", model, log_dir=tmp_path_factory.mktemp("logs"))
    yield engine
    engine.destroy()


def server_process(address: str) -> psutil.Process:
    port = address.rpartition(":")[2]
    for process in psutil.Process().children(recursive=True):
        arguments = " ".join(process.cmdline())
        # Its guard has the same arguments, after its own name.
        if f"api_server --host 127.0.0.1 --port {port} " in arguments and "guard.py" not in arguments:
            return process
    raise AssertionError(f"no server at {address}")


async def test_updates_and_a_killed_server(engine: Any, model: str, tmp_path: Path) -> None:
    # One test, because the order matters: weights to two, one is killed, weights to the other.
    trainer = await asyncio.to_thread(make_trainer, model)
    trainer.connect_engine(engine, WeightUpdateMeta(type="distributed"))
    disturb(trainer, seed=1)
    long = [request(ids, max_new_tokens=200, ignore_eos=True) for ids in prompts(6)]
    responses = await update_in_flight(
        engine, trainer, WeightUpdateMeta(type="distributed", version=1, chunk_mb=1), long
    )
    new = exported(trainer, tmp_path / "first")
    assert set.union(*(set(response.output_versions) for response in responses)) == {0, 1}
    for response in responses:
        check_against({0: model, 1: new}, response)

    since = tokens_so_far(engine)
    replica = engine.fleet.live[0]
    victim = server_process(replica.address)
    requests = [
        request(ids, max_new_tokens=250 + i, ignore_eos=True, seed=i, temperature=0.8)
        for i, ids in enumerate(prompts(64))
    ]
    running = [asyncio.create_task(engine.agenerate(one)) for one in requests]
    await until_generated(engine, 100, since)
    assert len(replica.attempts) > 16, "too late: the server has little left to lose"
    os.kill(victim.pid, signal.SIGKILL)
    responses = await asyncio.gather(*running)

    assert [response.output_len for response in responses] == [250 + i for i in range(64)]
    assert [response.input_tokens for response in responses] == prompts(64)
    for response in responses[::4]:
        assert set(response.output_versions) == {1}
        check_against({1: new}, response, temperature=0.8)
    assert len(engine.fleet.live) == 1

    # The group is made anew without it.
    disturb(trainer, seed=2)
    await asyncio.to_thread(send, engine, trainer, WeightUpdateMeta(type="distributed", version=2, chunk_mb=1))
    second = exported(trainer, tmp_path / "second")
    trainer.destroy()
    response = await engine.agenerate(request(prompts(1)[0], ignore_eos=True))
    assert set(response.output_versions) == {2}
    check_against({2: second}, response)
