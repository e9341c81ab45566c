"""What is said to a server for each sampling option, and how its answers are read."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.errors import BadInputError
from areal_vllm.client import ServerError, ServerGone
from areal_vllm.protocol import SPEAKERS, Call, Part, Span, as_seed, sampling_params


def params_of(*, most: int = 100, done: int = 0, seed: int | None = None, **fields: Any) -> dict[str, Any]:
    gconfig = GenerationHyperparameters(**fields)
    return sampling_params(gconfig, max_new_tokens=most, stop_token_ids=gconfig.stop_token_ids, seed=seed, done=done)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"greedy": True, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5, "presence_penalty": 0.0, "repetition_penalty": 1.0}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"min_new_tokens": 4}, {"min_tokens": 4}),
        ({"min_new_tokens": 4, "ignore_eos": True}, {"min_tokens": 0}),
        ({"min_new_tokens": 4, "ignore_eos": True, "stop_token_ids": [5]}, {"min_tokens": 4}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
        ({"stop": ["END"]}, {"stop": ["END"], "skip_special_tokens": False}),
    ],
)
def test_sampling_params_when_an_option_is_set(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = params_of(**fields)

    assert {name: params[name] for name in expected} == expected


def test_sampling_params_when_every_option_of_the_framework_is_listed() -> None:
    # A field that is added to the framework must be mapped, or refused.
    mapped = {
        *("n_samples", "max_new_tokens", "max_tokens", "min_new_tokens", "greedy", "temperature", "top_p", "top_k"),
        *("min_p", "stop_token_ids", "stop", "ignore_eos", "seed", "frequency_penalty"),
    }

    assert {field.name for field in attrs.fields(GenerationHyperparameters)} == mapped


def test_sampling_params_when_tokens_exist_already() -> None:
    params = params_of(most=10, done=4, min_new_tokens=6, seed=3)

    assert (params["max_tokens"], params["min_tokens"], params["seed"]) == (6, 2, 3)


def test_sampling_params_when_more_tokens_are_wanted_than_fit() -> None:
    # vLLM refuses a minimum above the maximum; the framework bans stop tokens until the end then.
    assert params_of(most=5, min_new_tokens=9)["min_tokens"] == 5


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_sampling_params_when_vllm_cannot_have_the_temperature(temperature: float) -> None:
    with pytest.raises(BadInputError, match=r"gconfig.temperature is .*vLLM samples at 0.01 to 2"):
        params_of(temperature=temperature)


def test_sampling_params_when_a_stop_string_is_empty() -> None:
    with pytest.raises(BadInputError, match=r"gconfig.stop holds an empty string"):
        params_of(stop=["a", ""])


@pytest.mark.parametrize("seed", [0, 1, 2**53, 2**63 - 1, 2**64 - 1])
def test_as_seed_when_any_seed_comes_in(seed: int) -> None:
    # vLLM takes -1 for no seed, and JSON readers of 64 bits no more than that.
    assert 0 <= as_seed(seed) < 2**63


class OneAnswer:
    """A client that has one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.body: dict[str, Any] = {}

    async def generate(self, address: str, path: str, *, body: Any, timeout: float) -> Any:
        self.body = body
        return self.answer


CALL = Call(model="m", prompt=[1, 2], params={"max_tokens": 2}, request_id="r")


async def run(transport: Any, answer: Any, call: Call = CALL) -> tuple[Part, dict[str, Any]]:
    client, part = OneAnswer(answer), Part()
    await SPEAKERS[transport].run(client, "host:1", call, part)  # type: ignore[arg-type]
    return part, client.body


async def test_generate_when_the_answer_has_spans() -> None:
    content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}

    part, body = await run("generate", {"choices": [choice]})

    assert (part.tokens, part.logprobs, part.finish) == ([5, 6], [-0.5, -0.25], "stop")
    assert part.spans == [Span("3", 0, 1), Span("4", 1, 2)]
    assert body == {
        "model": "m",
        "token_ids": [1, 2],
        "request_id": "r",
        "sampling_params": {"max_tokens": 2, "logprobs": 0, "detokenize": False},
    }


async def test_run_when_the_sampled_token_is_none_of_the_likeliest_expected_it_among_the_candidates() -> None:
    call = attrs.evolve(CALL, candidates=2)
    top = [{"token_id": 8, "logprob": -0.1}, {"token_id": 9, "logprob": -2.5}]
    content = [{"token_id": 5, "logprob": -7.0, "top_logprobs": top}]
    one = {"token_ids": [5], "logprobs": {"content": content}, "finish_reason": "stop"}
    told = {"token_logprobs": [-7.0], "top_logprobs": [{"token_id:8": -0.1, "token_id:9": -2.5}]}
    other = {"token_ids": [5], "logprobs": told, "finish_reason": "stop"}

    generated, _ = await run("generate", {"choices": [one]}, call)
    completed, _ = await run("completions", {"choices": [other]}, call)

    assert generated.candidates == completed.candidates == [{8: -0.1, 9: -2.5, 5: -7.0}]


async def test_generate_when_stop_strings_need_the_text() -> None:
    choice = {"token_ids": [], "logprobs": None, "finish_reason": "length"}

    _, body = await run("generate", {"choices": [choice]}, attrs.evolve(CALL, params={"stop": ["x"]}))

    assert body["sampling_params"] == {"stop": ["x"], "logprobs": 0}


async def test_completions_when_the_answer_has_token_ids() -> None:
    choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "length"}

    part, body = await run("completions", {"choices": [choice]}, attrs.evolve(CALL, cache_salt="v1"))

    assert (part.tokens, part.logprobs, part.finish, part.spans) == ([5, 6], [-0.5, -0.25], "length", [])
    assert body["prompt"] == [1, 2] and body["return_token_ids"] is True and body["add_special_tokens"] is False
    assert body["cache_salt"] == "v1" and body["max_tokens"] == 2


@pytest.mark.parametrize("transport", ["generate", "completions"])
@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"choices": [{"token_ids": [5], "logprobs": None, "finish_reason": "stop"}]},
        {"choices": ["text"]},
        {
            "choices": [
                {"logprobs": {"token_logprobs": [-1.0], "content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
            ]
        },
    ],
)
async def test_run_when_an_answer_has_another_shape(transport: Any, answer: Any) -> None:
    with pytest.raises(ServerError, match=r"host:1/.*not vLLM's"):
        await run(transport, answer)


@pytest.mark.parametrize("transport", ["generate", "completions"])
async def test_run_when_an_answer_has_no_end(transport: Any) -> None:
    with pytest.raises(ServerGone, match="in the middle"):
        await run(transport, {"choices": []})


@pytest.mark.parametrize("transport", ["generate", "completions"])
async def test_run_when_the_server_failed_in_the_middle(transport: Any) -> None:
    with pytest.raises(ServerError, match="failed in the middle"):
        await run(transport, {"choices": [{"token_ids": [], "finish_reason": "error"}]})
