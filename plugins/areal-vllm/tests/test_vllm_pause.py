"""Pausing, versions, cancelling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, log_softmax, logits_of, make_request

from areal_core.api.io_struct import ModelResponse
from areal_vllm.engine import VLLMEngine

Serve = Connect = Ask = Callable[..., Any]


def logprobs_by_version(answer: ModelResponse, weights: dict[int, str]) -> np.ndarray:
    """Of each token, by the weights of the version that it carries."""
    return np.array(
        [
            log_softmax(logits_of(weights[version], [*answer.input_tokens, *answer.output_tokens[:i]]))[token]
            for i, (token, version) in enumerate(zip(answer.output_tokens, answer.output_versions, strict=True))
        ]
    )


async def update_in_flight(engine: VLLMEngine, server: FakeServer, **fields: Any) -> ModelResponse:
    """A request that has 5 tokens when the weights change."""
    start = server.generated
    await asyncio.to_thread(server.allow, 5)
    task = asyncio.ensure_future(engine.agenerate(make_request([1, 2], max_new_tokens=12, **fields)))
    await asyncio.to_thread(server.wait_for, lambda: server.generated == start + 5)
    await asyncio.to_thread(engine.pause_generation)
    server.weights = "new"
    await asyncio.to_thread(engine.weights_updated, 1)
    await asyncio.to_thread(engine.set_version, 1)
    await asyncio.to_thread(server.allow, None)
    await asyncio.to_thread(engine.continue_generation)
    return await task


@pytest.mark.parametrize("stream_interval", [None, 2])
def test_pause_when_the_server_tells_versions(serve: Serve, connect: Connect, stream_interval: int | None) -> None:
    server = serve()
    engine = connect(server, stream_interval=stream_interval)

    answer = asyncio.run(update_in_flight(engine, server))

    assert answer.output_versions == [0] * 5 + [1] * 7
    expected = logprobs_by_version(answer, {0: "start", 1: "new"})
    np.testing.assert_allclose(answer.output_logprobs, expected, rtol=0, atol=1e-9)
    pauses = [query for path, query, _ in server.log if path == "/pause"]
    assert pauses == [{"mode": "keep", "clear_cache": "true"}]
    assert engine.export_stats()["resumed"] == 0


@pytest.mark.parametrize("stream_interval", [None, 2])
def test_pause_when_the_server_tells_no_versions(serve: Serve, connect: Connect, stream_interval: int | None) -> None:
    server = serve(scale_out=False)
    engine = connect(server, stream_interval=stream_interval)

    answer = asyncio.run(update_in_flight(engine, server))

    # What it had was taken, and the rest asked for again: no answer of the server is of two versions.
    assert answer.output_versions == [0] * 5 + [1] * 7
    expected = logprobs_by_version(answer, {0: "start", 1: "new"})
    np.testing.assert_allclose(answer.output_logprobs, expected, rtol=0, atol=1e-9)
    pauses = [query for path, query, _ in server.log if path == "/pause"]
    assert pauses == [{"mode": "abort", "clear_cache": "true"}]
    stats = engine.export_stats()
    assert stats["resumed"] == 1 and stats["retries"] == 0 and stats["continued_tokens"] == 5


def test_pause_when_the_rest_cannot_be_made_from_the_beginning(serve: Serve, connect: Connect) -> None:
    server = serve(scale_out=False, logprobs_mode="raw_logprobs")
    engine = connect(server)

    answer = asyncio.run(update_in_flight(engine, server, frequency_penalty=0.5))

    assert answer.output_versions == [1] * 12
    assert engine.export_stats()["lost_tokens"] == 5


@pytest.mark.parametrize("scale_out", [True, False])
def test_pause_when_the_server_cannot_be_paused(serve: Serve, connect: Connect, scale_out: bool) -> None:
    # With scale_out its answers carry a label, but one that nobody can change.
    server = serve(dev_mode=False, scale_out=scale_out)
    engine = connect(server)

    async def main() -> tuple[ModelResponse, ModelResponse]:
        start = server.generated
        await asyncio.to_thread(server.allow, 5)
        running = asyncio.ensure_future(engine.agenerate(make_request([1, 2], max_new_tokens=12)))
        await asyncio.to_thread(server.wait_for, lambda: server.generated == start + 5)
        pausing = asyncio.ensure_future(asyncio.to_thread(engine.pause_generation))
        await asyncio.to_thread(server.allow, None)
        await pausing
        assert server.running == 0
        waiting = asyncio.ensure_future(engine.agenerate(make_request([3])))
        before = len(server.log)
        await asyncio.to_thread(engine.set_version, 1)
        assert len(server.log) == before
        await asyncio.to_thread(engine.continue_generation)
        return await running, await waiting

    first, second = asyncio.run(main())

    assert first.output_versions == [0] * 12 and second.output_versions == [1] * 8


def test_pause_when_nothing_runs_asks_no_server(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server)

    engine.pause_generation()
    engine.pause_generation()
    engine.continue_generation()

    assert "/pause" not in server.paths() and "/resume" not in server.paths()
    assert ask(engine, [1]).output_len == 8


def test_pause_when_weights_are_replaced_pauses_servers_that_do_nothing(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    engine.pause_generation()

    engine.fleet.pause_servers()
    engine.fleet.pause_servers()
    engine.continue_generation()
    engine.continue_generation()

    assert [path for path in server.paths() if path in ("/pause", "/resume")] == ["/pause", "/resume"]


def test_agenerate_when_paused_waits(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)

    async def main() -> list[ModelResponse]:
        await asyncio.to_thread(engine.pause_generation)
        before = len(server.log)
        tasks = [asyncio.ensure_future(engine.agenerate(make_request([n + 1]))) for n in range(4)]
        # Something that takes the engine's thread longer than sending a request.
        await asyncio.to_thread(engine.fleet.post_all, "/reset_prefix_cache")
        assert len(server.log) == before + 1
        await asyncio.to_thread(engine.continue_generation)
        return list(await asyncio.gather(*tasks))

    assert [answer.output_len for answer in asyncio.run(main())] == [8] * 4


def test_pause_when_keys_and_values_are_kept(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server, rollout={"weight_update_keep_kv": True})

    asyncio.run(update_in_flight(engine, server))
    asyncio.run(engine.agenerate(make_request([1, 2])))

    assert [query for path, query, _ in server.log if path == "/pause"] == [{"mode": "keep", "clear_cache": "false"}]
    # New requests share nothing with those before the update.
    assert [body["cache_salt"] for body in server.bodies()[-2:]] == ["version-0", "version-1"]


def test_set_version_when_it_changes_labels_the_servers(serve: Serve, connect: Connect, ask: Ask) -> None:
    servers = [serve(), serve()]
    engine = connect(*servers)

    engine.set_version(7)
    engine.set_version(7)

    assert engine.get_version() == 7 and [server.label for server in servers] == ["7", "7"]
    labels = [body for path, _, body in servers[0].log if path == "/update_weight_version"]
    assert labels == [{"new_version": "0"}, {"new_version": "7"}]
    assert ask(engine, [1]).output_versions == [7] * 8


@pytest.mark.parametrize("label", ["theirs", "40", "-1"])
def test_agenerate_when_somebody_else_labels_the_weights(serve: Serve, connect: Connect, ask: Ask, label: str) -> None:
    server, other = serve(), serve()
    engine = connect(server, other)
    engine.pause_generation()
    engine.weights_updated(3)
    engine.continue_generation()
    engine.fleet.members.bring_up_to_date = None
    server.label = label

    answers = [ask(engine, [n + 1]) for n in range(3)]

    # Whose weights it has nobody knows: it is not asked again before the next update.
    assert [answer.output_versions for answer in answers] == [[3] * 8] * 3
    assert engine.export_stats()["retries"] == 1
    assert not engine.fleet.loop.call(engine.fleet.members.check(engine.fleet.replicas[0]))
    assert engine.fleet.replicas[0].state == "stale"


def test_agenerate_when_an_adapter_was_lost(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server)
    engine.pause_generation()
    server.other_models.add("mine")
    engine.request_model = "mine"
    engine.weights_updated(1)
    engine.continue_generation()
    assert ask(engine, [1]).output_versions == [1] * 8

    def load_again(replica: Any) -> bool:
        server.other_models.add("mine")
        return True

    engine.fleet.members.bring_up_to_date = load_again
    server.kill()
    server.start()

    assert ask(engine, [1]).output_versions == [1] * 8
    assert engine.export_stats()["retries"] == 1


def test_agenerate_when_a_server_loads_its_weights_again_is_answered_by_the_other(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    server, other = serve(), serve()
    engine = connect(server, other)
    engine.pause_generation()
    engine.weights_updated(1)
    engine.continue_generation()
    answered = threading.Event()
    in_time: list[bool] = []

    def load_again(replica: Any) -> bool:
        in_time.append(answered.wait(5))
        return True

    engine.fleet.members.bring_up_to_date = load_again
    server.label = "theirs"
    answers = [ask(engine, [n + 1]) for n in range(2)]
    answered.set()

    assert [answer.output_versions for answer in answers] == [[1] * 8] * 2
    assert engine.export_stats()["retries"] == 1
    assert engine.fleet.loop.call(engine.fleet.members.check(engine.fleet.replicas[0]))
    assert in_time == [True]


def test_agenerate_when_cancelled_stops_the_server(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.allow(0)

    async def main() -> None:
        task = asyncio.ensure_future(engine.agenerate(make_request([1])))
        await asyncio.to_thread(server.wait_for, lambda: server.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())

    server.wait_for(lambda: server.running == 0)
    assert engine.export_stats()["running"] == 0


def test_destroy_when_requests_run(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.allow(0)

    async def main() -> ModelResponse:
        task = asyncio.ensure_future(engine.agenerate(make_request([1])))
        await asyncio.to_thread(server.wait_for, lambda: server.running == 1)
        await asyncio.to_thread(engine.destroy)
        return await task

    assert asyncio.run(main()).stop_reason == "abort"


def test_connect_when_the_server_was_left_paused(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    first = connect(server)
    first.pause_generation()
    first.fleet.pause_servers()
    first.destroy()

    engine = connect(server)

    assert ask(engine, [1]).output_len == 8
    assert server.paths().count("/resume") == 1


def test_pause_when_a_request_has_not_begun_on_a_server_without_versions(serve: Serve, connect: Connect) -> None:
    server = serve(scale_out=False)
    engine = connect(server, max_connections=1)
    server.allow(0)

    async def main() -> list[ModelResponse]:
        # The second waits for the connection of the first, and gets it when the server does nothing any more.
        tasks = [asyncio.ensure_future(engine.agenerate(make_request([n + 1]))) for n in range(2)]
        await asyncio.to_thread(server.wait_for, lambda: server.running == 1)
        await asyncio.to_thread(engine.pause_generation)
        server.weights = "new"
        await asyncio.to_thread(engine.weights_updated, 1)
        await asyncio.to_thread(server.allow, None)
        await asyncio.to_thread(engine.continue_generation)
        return list(await asyncio.gather(*tasks))

    for answer in asyncio.run(main()):
        assert answer.output_versions == [1] * 8
        expected = logprobs_by_version(answer, {1: "new"})
        np.testing.assert_allclose(answer.output_logprobs, expected, rtol=0, atol=1e-9)
    assert engine.export_stats()["retries"] == 0
