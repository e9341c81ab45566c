"""Every sampling option by a real server: what it does to the tokens, and that log-probs stay the framework's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from real_servers import VOCABULARY, check_against, forward, prompts, request, word

from areal_core.api.io_struct import ModelResponse
from areal_vllm.logprobs import LogprobMode

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(real_model: str) -> str:
    return real_model


@pytest.fixture
def engine(real_engine: Any) -> Any:
    return real_engine


async def ask(engine: Any, *, count: int = 4, **options: Any) -> list[ModelResponse]:
    options = {"max_new_tokens": 24, "ignore_eos": True, **options}
    tasks = [engine.agenerate(request(ids, seed=i, **options)) for i, ids in enumerate(prompts(count))]
    return list(await asyncio.gather(*tasks))


def distributions(model: str, response: ModelResponse) -> torch.Tensor:
    """fp32 ``[output_len, V]``: log-probs at temperature 1 where each token was sampled."""
    return forward(model, [*response.input_tokens, *response.output_tokens])[response.input_len - 1 :]


def test_connect_when_the_run_started_the_server(engine: Any) -> None:
    assert engine.capabilities.logprob_mode is LogprobMode.FRAMEWORK
    assert not set(engine.capabilities.missing) & {"generate", "pause", "weight_version", "collective_rpc"}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 3},
        {"top_p": 0.6, "temperature": 0.8},
        {"min_p": 0.2, "temperature": 1.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
        {"frequency_penalty": 1.5},
        {"greedy": True, "frequency_penalty": 1.5, "temperature": 0.3},
        {"min_new_tokens": 12, "stop_token_ids": list(range(2, 60))},
    ],
)
async def test_logprobs_when_sampling_is_shaped(engine: Any, model: str, options: dict[str, Any]) -> None:
    for response in await ask(engine, **options):
        temperature = 1.0 if options.get("greedy") else options.get("temperature", 1.0)
        check_against({engine.get_version(): model}, response, temperature)


async def test_logprobs_when_requests_of_one_batch_differ(engine: Any, model: str) -> None:
    shapes = [{"temperature": 0.5}, {"temperature": 1.5, "top_k": 4}, {"greedy": True}, {"min_p": 0.3}] * 4

    responses = await asyncio.gather(*(ask(engine, count=1, **shape) for shape in shapes))

    for shape, (response,) in zip(shapes, responses, strict=True):
        temperature = 1.0 if shape.get("greedy") else float(shape.get("temperature", 1.0))
        check_against({engine.get_version(): model}, response, temperature)


async def test_top_k_when_set(engine: Any, model: str) -> None:
    for response in await ask(engine, top_k=3):
        kept = distributions(model, response).topk(3).indices.tolist()
        assert all(token in ids for token, ids in zip(response.output_tokens, kept, strict=True))


async def test_top_p_when_set(engine: Any, model: str) -> None:
    for response in await ask(engine, top_p=0.5):
        for token, logprobs in zip(response.output_tokens, distributions(model, response), strict=True):
            before = logprobs[logprobs > logprobs[token]].exp().sum()
            assert before < 0.5 + 1e-4


async def test_min_p_when_set(engine: Any, model: str) -> None:
    for response in await ask(engine, min_p=0.3):
        for token, logprobs in zip(response.output_tokens, distributions(model, response), strict=True):
            assert logprobs[token].exp() >= 0.3 * logprobs.max().exp() - 1e-5


@pytest.mark.parametrize("options", [{"top_k": 6}, {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8}])
async def test_supports_when_wanted(engine: Any, model: str, options: dict[str, Any]) -> None:
    one = request(prompts(1)[0], seed=1, max_new_tokens=24, ignore_eos=True, **options)
    one.return_supports = True

    response = await engine.agenerate(one)

    assert response.output_supports is not None
    temperature = options.get("temperature", 1.0)
    scaled = torch.log_softmax(distributions(model, response) / temperature, dim=-1)
    rows = zip(response.output_tokens, response.output_logprobs, response.output_supports, scaled, strict=True)
    for token, logprob, support, logprobs in rows:
        ids = torch.tensor(support[support >= 0].tolist())
        # The likeliest, the sampled one among them, and as many as the written-out rule keeps.
        order = logprobs.sort(descending=True)
        assert set(ids.tolist()) == set(order.indices[: len(ids)].tolist())
        assert token in ids and len(ids) <= options["top_k"]
        if "top_p" not in options:
            assert len(ids) == options["top_k"]
        else:
            probs = order.values[: options["top_k"]].exp()
            probs = probs[probs >= options["min_p"] * probs[0]]
            probs = probs / probs.sum()
            assert len(ids) == int((probs.cumsum(0) - probs < options["top_p"] - 1e-6).sum())
        expected = logprobs[token] - logprobs[ids].logsumexp(0)
        torch.testing.assert_close(torch.tensor(logprob), expected, rtol=0, atol=1e-4)


async def test_frequency_penalty_when_greedy(engine: Any, model: str) -> None:
    for response in await ask(engine, greedy=True, frequency_penalty=2.0):
        counts = torch.zeros(VOCABULARY)
        for token, logprobs in zip(response.output_tokens, distributions(model, response), strict=True):
            assert token == int((logprobs - 2.0 * counts).argmax())
            counts[token] += 1


async def test_min_new_tokens_when_stops_are_likely(engine: Any) -> None:
    stops = list(range(2, 100))

    responses = await ask(engine, count=8, min_new_tokens=6, stop_token_ids=stops)

    assert all(response.output_len > 6 for response in responses)
    assert all(token not in stops for response in responses for token in response.output_tokens[:6])
    assert all(response.stop_reason == "stop" and response.output_tokens[-1] in stops for response in responses)


async def test_eos_when_it_is_ignored_or_not(engine: Any, model: str) -> None:
    # So warm, and so few words, that EOS (1) comes sooner or later.
    options = {"temperature": 2.0, "max_new_tokens": 120}
    ignoring = await ask(engine, count=8, ignore_eos=True, **options)

    stopping = await ask(engine, count=8, ignore_eos=False, **options)

    assert all(response.output_len == 120 for response in ignoring)
    assert sum(1 in response.output_tokens for response in ignoring) > 0
    for free, stopped in zip(ignoring, stopping, strict=True):
        end = free.output_tokens.index(1) + 1 if 1 in free.output_tokens else 120
        # Equal seeds: the same tokens up to there, unless the last bits of a logit decide.
        assert stopped.output_len == end or stopped.output_tokens[-1] == 1 or stopped.output_len == 120
        assert (stopped.stop_reason == "stop") == (stopped.output_tokens[-1] == 1)
        assert 1 not in stopped.output_tokens[:-1]


async def test_stop_strings_when_one_comes(engine: Any, model: str) -> None:
    (free,) = await ask(engine, count=1, greedy=True)
    target = free.output_tokens[5]
    end = free.output_tokens.index(target) + 1

    (response,) = await ask(engine, count=1, greedy=True, stop=["no such text", word(target)])

    assert response.output_tokens == free.output_tokens[:end]
    assert response.stop_reason == "stop"
    check_against({engine.get_version(): model}, response)


async def test_stop_strings_when_they_are_special_tokens(engine: Any) -> None:
    options = {"temperature": 2.0, "max_new_tokens": 120, "ignore_eos": True}

    responses = await ask(engine, count=8, stop=[word(1)], **options)

    ends = [response for response in responses if response.stop_reason == "stop"]
    assert ends and all(response.output_tokens[-1] == 1 for response in ends)


async def test_seed_when_the_same_request_is_alone_or_not(engine: Any) -> None:
    (alone,) = await ask(engine, count=1, temperature=0.9)

    crowd = await ask(engine, count=24, temperature=0.9)

    assert crowd[0].output_tokens == alone.output_tokens
