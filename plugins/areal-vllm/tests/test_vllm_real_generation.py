"""Generation by a real vLLM server: what is asked for is what comes, with the log-probs of transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from real_servers import (
    ARGS,
    check_against,
    forward,
    prompts,
    request,
    tokens_so_far,
    until_generated,
)

from areal_core.errors import BadInputError

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(real_model: str) -> str:
    return real_model


@pytest.fixture
def engine(real_engine: Any) -> Any:
    return real_engine


async def run(engine: Any, *requests: Any) -> list[Any]:
    return list(await asyncio.gather(*(engine.agenerate(one) for one in requests)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_when_sampling(engine: Any, model: str, temperature: float) -> None:
    requests = [request(ids, max_new_tokens=40, temperature=temperature, ignore_eos=True) for ids in prompts(8)]

    responses = await run(engine, *requests)

    for response in responses:
        assert response.output_len == 40
        assert response.stop_reason == "length"
        assert response.ttft <= response.latency
        check_against({engine.get_version(): model}, response, temperature)


async def test_generate_when_greedy(engine: Any, model: str) -> None:
    (response,) = await run(engine, request(prompts(1)[0], max_new_tokens=24, greedy=True, ignore_eos=True))

    ids = [*response.input_tokens, *response.output_tokens]
    best = forward(model, ids)[response.input_len - 1 :].argmax(-1)
    assert response.output_tokens == best.tolist()


async def test_generate_when_there_are_stop_ids(engine: Any) -> None:
    prompt = prompts(1)[0]
    (free,) = await run(engine, request(prompt, greedy=True, ignore_eos=True, max_new_tokens=24))
    stop = free.output_tokens[9]

    (response,) = await run(engine, request(prompt, greedy=True, ignore_eos=True, stop_token_ids=[stop, 3]))

    end = min(free.output_tokens.index(token) for token in (stop, 3) if token in free.output_tokens)
    # The stop token was sampled, so it is there, with its log-prob.
    assert response.output_tokens == free.output_tokens[: end + 1]
    assert response.stop_reason == "stop"
    assert len(response.output_logprobs) == len(response.output_versions) == response.output_len


async def test_generate_when_several_samples_have_seeds(engine: Any) -> None:
    prompt = prompts(1)[0]
    options = {"max_new_tokens": 20, "ignore_eos": True}
    first = await run(engine, *(request(prompt, seed=seed, **options) for seed in range(6)))

    again = await run(engine, *(request(prompt, seed=seed, **options) for seed in reversed(range(6))))

    assert [r.output_tokens for r in first] == [r.output_tokens for r in reversed(again)]
    assert len({tuple(r.output_tokens) for r in first}) == 6


async def test_generate_when_prompts_are_computed_in_parts(engine: Any) -> None:
    # Together more than the server computes in one step, so that steps end in the middle of prompts.
    def make() -> list[Any]:
        options = {"max_new_tokens": 12, "ignore_eos": True}
        return [request(ids, seed=seed, **options) for seed, ids in enumerate(prompts(8, length=100))]

    alone = [await engine.agenerate(one) for one in make()]

    together = await run(engine, *make())

    assert [response.output_tokens for response in together] == [response.output_tokens for response in alone]


async def test_generate_when_the_sampler_truncates(engine: Any, model: str) -> None:
    requests = [request(ids, top_k=5, max_new_tokens=16, ignore_eos=True) for ids in prompts(4)]
    try:
        responses = await run(engine, *requests)
    except BadInputError as error:
        assert "top_k" in str(error)  # noqa: PT017 - an engine may refuse what it cannot give log-probs for
        return
    for response in responses:
        ids = [*response.input_tokens, *response.output_tokens]
        best = forward(model, ids)[response.input_len - 1 :].topk(5).indices
        for token, kept in zip(response.output_tokens, best.tolist(), strict=True):
            assert token in kept


async def test_generate_when_64_are_under_way(engine: Any, model: str) -> None:
    lengths = torch.randint(4, 60, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    requests = [
        request(ids, max_new_tokens=length, ignore_eos=True, seed=i)
        for i, (ids, length) in enumerate(zip(prompts(64), lengths, strict=True))
    ]

    responses = await run(engine, *requests)

    assert [response.output_len for response in responses] == lengths
    assert [response.input_tokens for response in responses] == prompts(64)
    for response in responses[::8]:
        check_against({engine.get_version(): model}, response)


async def test_pause_when_requests_run(engine: Any, model: str) -> None:
    requests = [request(ids, max_new_tokens=300, ignore_eos=True) for ids in prompts(6)]
    since = tokens_so_far(engine)
    running = [asyncio.create_task(engine.agenerate(one)) for one in requests]
    await until_generated(engine, 20, since)

    await asyncio.to_thread(engine.pause_generation)
    held = tokens_so_far(engine)
    late = asyncio.create_task(engine.agenerate(request(prompts(7)[6], max_new_tokens=4, ignore_eos=True)))
    done, _ = await asyncio.wait([*running, late], timeout=1.0)
    still = tokens_so_far(engine)
    await asyncio.to_thread(engine.continue_generation)
    responses = await asyncio.gather(*running, late)

    assert not done
    assert still == held
    assert [response.output_len for response in responses] == [300] * 6 + [4]
    for response in responses[:2]:
        check_against({engine.get_version(): model}, response)


async def test_generate_when_cancelled(engine: Any) -> None:
    since = tokens_so_far(engine)
    task = asyncio.create_task(engine.agenerate(request(prompts(1)[0], max_new_tokens=450, ignore_eos=True)))
    await until_generated(engine, 5, since)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    # The server is free again long before 450 tokens.
    (response,) = await run(engine, request(prompts(1)[0], max_new_tokens=4, ignore_eos=True))
    assert response.output_len == 4
    (address,) = since
    assert tokens_so_far(engine)[address] - since[address] < 450


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        (ARGS["max-model-len"], {}, "context"),
        (4, {"max_tokens": 4}, "max_tokens"),
    ],
)
async def test_generate_when_it_cannot_fit(engine: Any, size: int, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        await run(engine, request([5] * size, **options))


async def test_generate_when_the_context_ends_first(engine: Any) -> None:
    size = ARGS["max-model-len"] - 6

    (response,) = await run(engine, request([5] * size, max_new_tokens=100, ignore_eos=True))

    assert response.output_len == 6
    assert response.stop_reason == "length"
