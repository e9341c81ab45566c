"""Completions of servers that work: tokens, log-probs, versions, limits; and servers that cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_server import CONTEXT, EOS, log_softmax, logits_of, make_request

from areal_core.api.configs import InferenceEngineConfig
from areal_core.errors import ArealError, BadInputError
from areal_vllm.capabilities import _model_card
from areal_vllm.config import VLLMConfig
from areal_vllm.engine import VLLMEngine
from areal_vllm.logprobs import LogprobMode

Serve = Connect = Ask = Callable[..., Any]


def expected_logprobs(prompt: list[int], tokens: list[int], temperature: float = 1.0, weights: str = "start") -> Any:
    """The framework's definition, written out."""
    values = []
    for i, token in enumerate(tokens):
        values.append(log_softmax(logits_of(weights, [*prompt, *tokens[:i]]) / temperature)[token])
    return np.array(values)


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize("stream_interval", [None, 1, 3])
def test_agenerate_when_a_server_answers(
    serve: Serve, connect: Connect, ask: Ask, scale_out: bool, stream_interval: int | None
) -> None:
    engine = connect(serve(scale_out=scale_out), stream_interval=stream_interval)

    response = ask(engine, [1, 2, 3], max_new_tokens=10, temperature=0.7, metadata={"x": 1})

    assert response.input_tokens == [1, 2, 3] and response.output_len == 10 and response.stop_reason == "length"
    np.testing.assert_allclose(
        response.output_logprobs, expected_logprobs([1, 2, 3], response.output_tokens, 0.7), rtol=0, atol=1e-9
    )
    assert response.output_versions == [0] * 10
    assert 0 < response.ttft <= response.latency
    assert response.metadata == {"x": 1}


def test_agenerate_when_both_ways_have_the_same_seed(serve: Serve, connect: Connect, ask: Ask) -> None:
    by_generate, by_completions = connect(serve()), connect(serve(scale_out=False))

    answers = [ask(engine, [4, 5], seed=11, max_new_tokens=12) for engine in (by_generate, by_completions)]

    assert answers[0].output_tokens == answers[1].output_tokens
    assert by_generate.capabilities.transport == "generate"
    assert by_completions.capabilities.transport == "completions"


def test_agenerate_when_the_completion_ends_at_eos(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server)

    response = ask(engine, [1], max_new_tokens=60, ignore_eos=False, seed=0)

    assert response.stop_reason == "stop" and response.output_tokens[-1] == EOS
    # From the model's folder: a server may know the tokenizer's only.
    assert server.bodies()[-1]["sampling_params"]["stop_token_ids"] == [EOS]


def test_agenerate_when_eos_is_ignored(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server)

    response = ask(engine, [1], max_new_tokens=60, ignore_eos=True, stop_token_ids=[3], seed=0)

    assert server.bodies()[-1]["sampling_params"]["stop_token_ids"] == [3]
    assert response.output_tokens[-1] == 3 or response.output_len == 60


def test_agenerate_when_the_tokenizer_has_another_eos(serve: Serve, connect: Connect, ask: Ask) -> None:
    class Tokenizer:
        eos_token_id = 9

    server = serve()
    engine = connect(server)

    ask(engine, [1], ignore_eos=False, stop_token_ids=[5], tokenizer=Tokenizer())

    assert server.bodies()[-1]["sampling_params"]["stop_token_ids"] == [5, EOS, 9]


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_new_tokens": 500}, CONTEXT - 3),
        ({"max_new_tokens": 20, "max_tokens": 10}, 7),
        ({"max_new_tokens": 6}, 6),
    ],
)
def test_agenerate_when_a_limit_is_reached(
    serve: Serve, connect: Connect, ask: Ask, fields: dict[str, int], length: int
) -> None:
    response = ask(connect(serve()), [1, 2, 3], **fields)

    assert response.output_len == length and response.stop_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "input_ids is empty"),
        ([1, -1], {}, "negative id"),
        ([1] * CONTEXT, {}, f"the servers' context is {CONTEXT}, so a prompt may have at most {CONTEXT - 1}"),
        ([1] * 9, {"max_tokens": 9}, "max_tokens is 9"),
        ([1], {"n_samples": 2}, "n_samples is 2: send one request per sample"),
        ([1], {"temperature": 3.0}, "gconfig.temperature is 3"),
        ([1], {"stop": [""]}, "gconfig.stop holds an empty string"),
        ([1], {"image_data": ["picture"]}, "image_data: the vllm engine sends no images"),
    ],
)
def test_agenerate_when_a_request_can_never_be_answered(
    serve: Serve, connect: Connect, ask: Ask, prompt: list[int], fields: dict[str, Any], message: str
) -> None:
    server = serve()
    engine = connect(server)
    before = len(server.log)

    with pytest.raises(BadInputError, match=message):
        ask(engine, prompt, **fields)
    assert len(server.log) == before


def test_agenerate_when_the_server_refuses(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    engine = connect(server)
    server.context = 4  # It said otherwise at the start.

    with pytest.raises(BadInputError, match=r"/inference/v1/generate answered 400: .*maximum context length is 4"):
        ask(engine, [1, 2, 3])
    assert engine.export_stats()["retries"] == 0


def test_agenerate_when_many_ask_at_once(serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)

    async def main() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(make_request([n % 30 + 1], seed=n)) for n in range(64)))

    answers = asyncio.run(main())

    assert [answer.input_tokens for answer in answers] == [[n % 30 + 1] for n in range(64)]
    assert server.most_running > 8
    stats = engine.export_stats()
    assert stats["finished"] == 64 and stats["generated_tokens"] == 64 * 8 and stats["prefill_tokens"] == 64
    assert engine.export_stats()["finished"] == 0


def test_agenerate_when_called_from_several_event_loops(serve: Serve, connect: Connect, ask: Ask) -> None:
    engine = connect(serve())

    assert ask(engine, [1]).output_tokens == ask(engine, [1]).output_tokens


# ------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize(
    ("flag", "mode"),
    [
        ("raw_logprobs", LogprobMode.RAW),
        ("processed_logprobs", LogprobMode.PROCESSED),
        ("framework", LogprobMode.FRAMEWORK),
    ],
)
def test_connect_when_a_server_has_a_logprobs_mode(
    serve: Serve, connect: Connect, scale_out: bool, flag: str, mode: LogprobMode
) -> None:
    engine = connect(serve(logprobs_mode=flag, scale_out=scale_out))

    assert engine.capabilities.logprob_mode is mode


def test_connect_when_the_first_weights_tell_no_mode(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    server.weights = "flat"

    engine = connect(server)

    assert engine.capabilities.logprob_mode is LogprobMode.UNKNOWN
    with pytest.raises(BadInputError, match=r"its --logprobs-mode cannot be told. .* update its weights first"):
        ask(engine, [1])
    engine.pause_generation()
    server.weights = "new"
    engine.weights_updated(1)
    engine.continue_generation()
    assert engine.capabilities.logprob_mode is LogprobMode.PROCESSED
    assert ask(engine, [1]).output_versions == [1] * 8


@pytest.mark.parametrize("flag", ["raw_logits", "processed_logits"])
def test_connect_when_a_server_gives_logits(serve: Serve, connect: Connect, flag: str) -> None:
    with pytest.raises(BadInputError, match=r"gives logits in place of log-probs. Start it with --logprobs-mode"):
        connect(serve(logprobs_mode=flag))


@pytest.mark.parametrize(
    ("flag", "fields", "problem"),
    [
        ("raw_logprobs", {}, None),
        ("raw_logprobs", {"greedy": True, "temperature": 0.5}, None),
        ("raw_logprobs", {"top_k": 3}, None),
        ("raw_logprobs", {"min_new_tokens": 3}, None),
        ("raw_logprobs", {"temperature": 0.5}, "gconfig.temperature is 0.5, but .* raw_logprobs"),
        ("processed_logprobs", {"temperature": 0.5}, None),
        ("processed_logprobs", {"greedy": True, "top_k": 3, "top_p": 0.5}, None),
        ("processed_logprobs", {"top_k": 3}, "gconfig.top_k is 3, but .* processed_logprobs"),
        ("processed_logprobs", {"top_p": 0.5}, "gconfig.top_p is 0.5"),
        ("processed_logprobs", {"min_p": 0.5}, "gconfig.min_p is 0.5"),
        ("processed_logprobs", {"frequency_penalty": 0.5}, "gconfig.frequency_penalty is 0.5"),
        ("processed_logprobs", {"min_new_tokens": 3}, "gconfig.min_new_tokens is 3"),
        ("framework", {"temperature": 0.5, "top_k": 3, "min_new_tokens": 2}, None),
    ],
)
def test_agenerate_when_logprobs_must_be_the_frameworks(
    serve: Serve, connect: Connect, ask: Ask, flag: str, fields: dict[str, Any], problem: str | None
) -> None:
    engine = connect(serve(logprobs_mode=flag))
    if problem is not None:
        with pytest.raises(BadInputError, match=problem):
            ask(engine, [1, 2], **fields)
        return

    response = ask(engine, [1, 2], **fields)

    temperature = 1.0 if fields.get("greedy") else fields.get("temperature", 1.0)
    np.testing.assert_allclose(
        response.output_logprobs, expected_logprobs([1, 2], response.output_tokens, temperature), rtol=0, atol=1e-9
    )


# ------------------------------------------------------------------------------------------------- connecting


def test_connect_when_a_server_describes_no_routes(serve: Serve, connect: Connect) -> None:
    described, silent = connect(serve()), connect(serve(openapi=False))

    assert silent.capabilities.offered == described.capabilities.offered


def test_connect_when_a_server_is_not_in_dev_mode(serve: Serve, connect: Connect) -> None:
    capabilities = connect(serve(dev_mode=False)).capabilities

    assert not capabilities.pause and not capabilities.tells_versions and capabilities.lora_loading
    assert "VLLM_SERVER_DEV_MODE=1" in capabilities.missing["pause"]
    with pytest.raises(AttributeError):
        _ = capabilities.no_such_thing


@pytest.mark.parametrize(
    ("options", "server", "message"),
    [
        ({"transport": "generate"}, {"scale_out": False}, r"rollout.vllm.transport: .*/inference/v1/generate is not"),
        ({"model_name": "other"}, {}, r"rollout.vllm.model_name: .* has no model 'other'; it serves 'toy'"),
    ],
)
def test_connect_when_a_server_lacks_what_is_asked_for(
    serve: Serve, connect: Connect, options: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        connect(serve(**server), **options)


@pytest.mark.parametrize("other", [{"model": "another"}, {"context": 32}])
def test_connect_when_servers_differ(serve: Serve, connect: Connect, other: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="All must serve the same model alike"):
        connect(serve(), serve(**other))


def test_connect_when_nobody_listens(serve: Serve, connect: Connect) -> None:
    server = serve()
    server.kill()

    with pytest.raises(ArealError, match=rf"{server.address} is not ready after 0.3 s \(rollout.setup_timeout\)"):
        connect(server, rollout={"setup_timeout": 0.3})


def test_connect_when_it_is_no_vllm_server(serve: Serve, connect: Connect) -> None:
    server = serve()
    server.health = 404

    with pytest.raises(BadInputError, match="is no vLLM server"):
        connect(server)


@pytest.mark.parametrize(
    ("backend", "addresses", "message"),
    [
        ("vllm:d3", ["a:1", "b:1"], "means 3 servers, but rollout.addresses names 2"),
        ("vllm:c2", [], "has a size for context"),
        ("vllm:e2", [], "has a size for expert"),
        ("vllm", ["a:1", "host"], r"rollout.addresses\[1\]: 'host' names no server. Write host:port"),
        ("vllm", ["host:8000/v1"], r"rollout.addresses\[0\]: 'host:8000/v1' names no server"),
        ("vllm", ["a:1", "https://me:pw@host"], r"rollout.addresses\[1\] holds a user or a password[^@]*VLLM_API_KEY"),
        ("vllm", ["a:1", "b:1", "a:1"], r"rollout.addresses\[2\]: 'a:1' stands twice"),
    ],
)
def test_engine_when_the_backend_does_not_fit(backend: str, addresses: list[str], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        VLLMEngine(InferenceEngineConfig(backend=backend, addresses=addresses))


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:8000", "[::1]:8000", "https://host", "http://host:1/prefix/"])
def test_engine_when_an_address_is_well_written(address: str) -> None:
    assert VLLMEngine(InferenceEngineConfig(backend="vllm", addresses=[address])).config.addresses == [address]


def test_connect_when_the_address_is_a_url(serve: Serve, connect: Connect, ask: Ask) -> None:
    server = serve()
    address = f"http://{server.address}/"

    engine = connect(rollout={"addresses": [address]})

    assert ask(engine, [1]).output_len == 8


def test_connect_when_the_url_has_a_wrong_path(serve: Serve, connect: Connect) -> None:
    server = serve()

    with pytest.raises(BadInputError, match=r"http://.*/v1 is no vLLM server: .*/v1/health answered 404"):
        connect(rollout={"addresses": [f"http://{server.address}/v1"]})


def test_engine_when_used_after_destroy(serve: Serve, connect: Connect, ask: Ask) -> None:
    engine = connect(serve())
    engine.destroy()
    engine.destroy()

    with pytest.raises(ArealError, match="not running"):
        ask(engine, [1])
    assert engine.export_stats() == {}


def test_options_when_they_come_from_yaml() -> None:
    assert VLLMConfig().stream_interval == 64
    with pytest.raises(ValueError, match="must be >= 1"):
        VLLMConfig(stream_interval=0)


async def test_model_card_when_adapters_are_served_too_expected_the_model() -> None:
    class Lists:
        async def get(self, address: str, path: str, *, timeout: float) -> Any:
            return {"data": [{"id": "theirs", "parent": "toy"}, {"id": "toy", "parent": None}]}

    client: Any = Lists()

    card = await _model_card(client, "host:1", None, 1.0)

    assert card["id"] == "toy"
