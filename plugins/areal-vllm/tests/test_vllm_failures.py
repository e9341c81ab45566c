"""Servers that fail in the middle: nothing is lost, retries are counted, and who is well again is taken back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, log_softmax, logits_of, make_request

from areal_core.api.io_struct import ModelResponse
from areal_core.errors import ArealError
from areal_vllm.engine import VLLMEngine

Serve = Connect = Ask = Callable[..., Any]


def assert_sound(answer: ModelResponse, length: int) -> None:
    """Whole, and each token with its own log-prob: a token given twice or left out would shift them."""
    assert answer.output_len == len(answer.output_logprobs) == len(answer.output_versions) == length
    for i, token in enumerate(answer.output_tokens):
        expected = log_softmax(logits_of("start", [*answer.input_tokens, *answer.output_tokens[:i]]))[token]
        np.testing.assert_allclose(answer.output_logprobs[i], expected, rtol=0, atol=1e-9)


def check(engine: VLLMEngine, number: int) -> bool:
    fleet = engine.fleet
    return fleet.loop.call(fleet.members.check(fleet.replicas[number]))


@pytest.mark.parametrize("scale_out", [True, False])
def test_agenerate_when_a_server_is_killed_in_the_middle_of_64(serve: Serve, connect: Connect, scale_out: bool) -> None:
    servers = [serve(scale_out=scale_out), serve(scale_out=scale_out)]
    engine = connect(*servers, stream_interval=2)
    for server in servers:
        server.allow(0)

    async def main() -> list[ModelResponse]:
        tasks = [
            asyncio.ensure_future(engine.agenerate(make_request([n % 30 + 1], seed=n, max_new_tokens=20)))
            for n in range(64)
        ]
        await asyncio.to_thread(servers[0].wait_for, lambda: servers[0].running == 32)
        await asyncio.to_thread(servers[1].wait_for, lambda: servers[1].running == 32)
        # Each of its 32 has some tokens, none is at its end.
        before = servers[0].generated
        await asyncio.to_thread(servers[0].allow, 32 * 7)
        await asyncio.to_thread(servers[0].wait_for, lambda: servers[0].generated == before + 32 * 7)
        await asyncio.to_thread(servers[0].kill)
        await asyncio.to_thread(servers[1].allow, None)
        return list(await asyncio.gather(*tasks))

    answers = asyncio.run(main())

    for n, answer in enumerate(answers):
        assert answer.input_tokens == [n % 30 + 1] and answer.stop_reason == "length"
        assert_sound(answer, 20)
    stats = engine.export_stats()
    assert stats["finished"] == 64 and stats["retries"] == 32 and stats["dropped_servers"] == 1
    assert stats["servers"] == 1 and stats["running"] == 0
    # What had arrived was not generated again.
    assert stats["continued_tokens"] > 32 and stats["generated_tokens"] == 64 * 20
    assert servers[1].generated <= 64 * 20 - stats["continued_tokens"] + 20


def test_agenerate_when_it_goes_on_from_a_partial_answer(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, stream_interval=2)
    server.faults = [("break", 5)]

    answer = ask(engine, [1, 2], seed=5, max_new_tokens=12, min_new_tokens=0)

    first, second = server.bodies()[-2:]
    kept = len(second["token_ids"]) - 2
    assert kept == 5 and second["token_ids"] == [1, 2, *answer.output_tokens[:5]]
    assert second["sampling_params"]["max_tokens"] == 7
    # Other random numbers than those of the beginning.
    assert first["sampling_params"]["seed"] == 5 and second["sampling_params"]["seed"] == 6
    assert first["request_id"] != second["request_id"]
    assert_sound(answer, 12)


def test_agenerate_when_the_partial_answer_was_all(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, stream_interval=1)
    server.faults = [("break", 6)]
    before = len(server.bodies())

    answer = ask(engine, [1, 2], max_new_tokens=6)

    assert_sound(answer, 6)
    assert answer.stop_reason == "length" and len(server.bodies()) == before + 1


def test_agenerate_when_the_partial_answer_ends_with_a_stop(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, stream_interval=1)
    whole = ask(engine, [1, 2], max_new_tokens=20)
    stop = whole.output_tokens[6]
    end = whole.output_tokens.index(stop) + 1
    server.faults = [("break", end)]
    before = len(server.bodies())

    answer = ask(engine, [1, 2], max_new_tokens=20, stop_token_ids=[stop])

    assert answer.stop_reason == "stop" and answer.output_tokens == whole.output_tokens[:end]
    assert len(server.bodies()) == before + 1


@pytest.mark.parametrize("fields", [{"stop": ["x"]}, {"frequency_penalty": 0.5}])
def test_agenerate_when_the_rest_depends_on_the_server(
    serve: Serve, connect: Connect, ask: Ask, fields: dict[str, Any]
) -> None:
    server = serve(logprobs_mode="raw_logprobs")
    engine = connect(server, stream_interval=1)
    server.faults = [("break", 5)]

    answer = ask(engine, [1, 2], seed=5, max_new_tokens=12, **fields)

    # Again from the start, with the same random numbers.
    first, second = server.bodies()[-2:]
    assert second["token_ids"] == [1, 2] and second["sampling_params"] == first["sampling_params"]
    assert_sound(answer, 12)
    assert engine.export_stats()["lost_tokens"] == 5


@pytest.mark.parametrize(
    ("fault", "stream_interval"),
    [
        *((fault, interval) for fault in (("status", 500), ("status", 503), ("status", 429)) for interval in (None, 1)),
        *((fault, interval) for fault in (("close",), ("break", 1)) for interval in (None, 1)),
        (("truncate",), 1),
    ],
)
def test_agenerate_when_one_answer_fails(
    serve: Serve, connect: Connect, ask: Ask, fault: tuple[Any, ...], stream_interval: int | None
) -> None:
    server = serve()
    engine = connect(server, stream_interval=stream_interval)
    server.faults = [fault]

    answer = ask(engine, [1, 2], max_new_tokens=9)

    assert_sound(answer, 9)
    stats = engine.export_stats()
    assert stats["retries"] == 1 and stats["finished"] == 1
    # The server lives, so it stays.
    assert stats["dropped_servers"] == 0 and stats["servers"] == 1


def test_agenerate_when_one_server_answers_500_asks_the_other(serve: Serve, connect: Connect, ask: Ask) -> None:
    good, bad = serve(), serve()
    engine = connect(bad, good)
    bad.faults = [("status", 500)] * 99
    before = len(bad.bodies()), len(good.bodies())

    for n in range(6):
        assert_sound(ask(engine, [n + 1], max_new_tokens=9), 9)

    assert len(good.bodies()) == before[1] + 6 and len(bad.bodies()) > before[0]
    assert engine.export_stats()["retries"] == len(bad.bodies()) - before[0]


def test_agenerate_when_servers_fail_too_often(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, max_retries=2)
    server.faults = [("status", 500)] * 9

    with pytest.raises(ArealError, match=r"failed 3 times: .*answered 500: the engine is not well"):
        ask(engine, [1])
    assert len(server.faults) == 6
    assert engine.export_stats()["running"] == 0


def test_agenerate_when_no_server_is_left(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, wait_for_server=0.2)
    server.kill()

    with pytest.raises(ArealError, match=rf"no vLLM server is left: {server.address} is down \(no connection to"):
        ask(engine, [1])


def test_agenerate_when_the_only_server_comes_back(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server, wait_for_server=20.0, health_interval=0.05)
    server.kill()

    async def main() -> ModelResponse:
        task = asyncio.ensure_future(engine.agenerate(make_request([3])))
        while engine.fleet.members.router.ready:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        return await task

    assert_sound(asyncio.run(main()), 8)


def test_check_when_a_server_came_back_before_any_update(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    first.kill()
    assert not check(engine, 0)
    assert engine.export_stats()["servers"] == 1
    engine.fleet.replicas[0].data["adapter_id"] = 3

    first.start()

    assert check(engine, 0)
    assert first.label == "0"
    # What it had been given died with it.
    assert not engine.fleet.replicas[0].data


def test_check_when_a_server_came_back_with_old_weights(serve: Serve, connect: Connect, ask: Ask) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    engine.fleet.members.bring_up_to_date = lambda replica: False
    first.kill()
    check(engine, 0)
    engine.pause_generation()
    second.weights = "new"
    engine.weights_updated(1)
    engine.continue_generation()
    first.start()

    assert not check(engine, 0)

    assert engine.fleet.replicas[0].state == "stale"
    before = len(first.bodies())
    assert all(ask(engine, [1]).output_versions == [1] * 8 for _ in range(4))
    assert len(first.bodies()) == before
    # The next update makes it one of them again.
    engine.pause_generation()
    first.weights = second.weights = "newer"
    engine.weights_updated(2)
    engine.continue_generation()
    assert engine.fleet.replicas[0].state == "ready" and first.label == "2"


def test_set_version_when_a_server_has_old_weights_expected_still_out_of_use(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    engine.fleet.members.bring_up_to_date = None
    first.kill()
    check(engine, 0)
    engine.pause_generation()
    second.weights = "new"
    engine.weights_updated(1)
    engine.continue_generation()
    first.start()
    assert not check(engine, 0)

    # No weights come with it: those of the first server stay those of the beginning.
    engine.set_version(5)

    assert [replica.state for replica in engine.fleet.replicas] == ["stale", "ready"]
    assert (first.label, second.label) == ("default", "5")
    before = len(first.bodies())
    assert all(ask(engine, [1]).output_versions == [5] * 8 for _ in range(3))
    assert len(first.bodies()) == before


def test_check_when_a_server_came_back_and_can_be_updated(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)

    def bring_up_to_date(replica: Any) -> bool:
        engine.fleet.post_all(
            "/collective_rpc",
            json={"method": "reload_weights", "kwargs": {"weights_path": "new"}},
            replicas=[replica],
        )
        return True

    engine.fleet.members.bring_up_to_date = bring_up_to_date
    first.kill()
    check(engine, 0)
    engine.pause_generation()
    engine.weights_updated(1)
    engine.continue_generation()
    first.start()

    assert check(engine, 0)
    assert (first.weights, first.label, engine.fleet.replicas[0].version) == ("new", "1", 1)


def test_watch_when_one_server_loads_weights_still_looks_at_the_other(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second, health_interval=0.05)
    members, replica = engine.fleet.members, engine.fleet.replicas[1]
    loading, dropped = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def bring_up_to_date(_: Any) -> bool:
        loading.set()
        in_time.append(dropped.wait(5))
        return True

    members.bring_up_to_date = bring_up_to_date
    engine.pause_generation()
    engine.weights_updated(1, [replica])
    engine.continue_generation()
    assert loading.wait(20)
    drop = members.drop

    def noting(other: Any, reason: str) -> None:
        drop(other, reason)
        dropped.set()

    members.drop = noting
    second.health = 500

    assert check(engine, 0)
    assert in_time == [True] and replica.state == "down"


def test_check_when_a_server_was_only_unreachable(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    engine.pause_generation()
    engine.weights_updated(5)
    engine.continue_generation()
    first.health = 503
    assert not check(engine, 0)

    first.health = 200

    # It says which weights it has: they are the current ones.
    assert check(engine, 0)


def test_check_when_another_model_came_back(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    first.kill()
    check(engine, 0)
    first.model = "another"
    first.start()

    assert not check(engine, 0)
    assert "All must serve the same model" in engine.fleet.replicas[0].reason


def test_agenerate_when_a_server_hangs(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second, stream_interval=1)
    first.allow(3)
    second.allow(0)

    async def main() -> list[ModelResponse]:
        tasks = [asyncio.ensure_future(engine.agenerate(make_request([n + 1], max_new_tokens=6))) for n in range(2)]
        await asyncio.to_thread(first.wait_for, lambda: first.budget == 0)
        first.health = 503
        await asyncio.to_thread(check, engine, 0)
        await asyncio.to_thread(second.allow, None)
        return list(await asyncio.gather(*tasks))

    for answer in asyncio.run(main()):
        assert_sound(answer, 6)
    # The one that hung was told to stop.
    first.wait_for(lambda: first.running == 0)


def test_agenerate_when_the_turns_of_an_episode_follow_their_server(serve: Serve, connect: Connect, ask: Ask) -> None:
    servers = [serve(), serve(), serve()]
    engine = connect(*servers)
    before = [len(server.bodies()) for server in servers]

    for _ in range(5):
        ask(engine, [1, 2], metadata={"episode_id": "row-1/0/0"})

    assert sorted(len(server.bodies()) - b for server, b in zip(servers, before, strict=True)) == [0, 0, 5]
    home: FakeServer = max(servers, key=lambda server: len(server.bodies()))
    home.kill()
    assert_sound(ask(engine, [1, 2], metadata={"episode_id": "row-1/0/0"}), 8)


def test_post_all_when_one_of_two_is_gone(serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    first.kill()

    answers = engine.fleet.post_all("/reset_prefix_cache")

    assert answers == [None, {"success": True}]
    assert [replica.address for replica in engine.fleet.live] == [second.address]
    second.kill()
    with pytest.raises(ArealError, match="no vLLM server is left"):
        engine.fleet.post_all("/reset_prefix_cache")


def test_post_all_when_a_path_is_not_there(serve: Serve, connect: Connect) -> None:
    engine = connect(serve())

    with pytest.raises(ArealError, match="/no_such_path answered 404"):
        engine.fleet.post_all("/no_such_path")


def test_post_all_when_the_answer_is_text(serve: Serve, connect: Connect) -> None:
    engine = connect(serve())

    answers = engine.fleet.post_all("/v1/load_lora_adapter", json=lambda index, _: {"lora_name": f"a{index}"})

    assert answers == ["Success: LoRA adapter 'a0' added successfully."]


def test_agenerate_when_no_answer_comes_in_time(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server, rollout={"request_timeout": 0.3})
    server.allow(0)

    with pytest.raises(ArealError, match=r"was not answered in 0.3 s \(rollout.request_timeout\)"):
        ask(engine, [1])
    server.wait_for(lambda: server.running == 0)
    assert engine.export_stats()["servers"] == 1


def test_check_when_all_connections_are_in_use(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server, max_connections=2, health_timeout=5.0)
    server.allow(0)

    async def main() -> list[ModelResponse]:
        tasks = [asyncio.ensure_future(engine.agenerate(make_request([n + 1]))) for n in range(6)]
        await asyncio.to_thread(server.wait_for, lambda: server.running == 2)
        assert await asyncio.to_thread(check, engine, 0)
        await asyncio.to_thread(engine.pause_generation)
        await asyncio.to_thread(engine.continue_generation)
        await asyncio.to_thread(server.allow, None)
        return list(await asyncio.gather(*tasks))

    assert all(answer.output_len == 8 for answer in asyncio.run(main()))
    assert server.most_running == 2
