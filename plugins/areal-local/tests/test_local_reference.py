"""Greedy output against transformers.generate, and log-probs against a plain forward."""

from __future__ import annotations

import random

import pytest
import torch

from areal_local.decoder import RowwiseDecoder, SlottedDecoder

VOCAB = 97
FAST = ["qwen2", "qwen2-sliding", "qwen3", "llama", "mistral", "gemma3", "gemma2", "gpt2"]


def ragged_prompts(count, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("kind", [*FAST, "bloom"])
def test_greedy_when_prompts_are_ragged_equals_transformers_generate(
    kind, make_model, make_engine, generate, reference_logprobs, transformers_greedy
):
    model = make_model(kind)
    prompts = ragged_prompts(10, 40)
    counts = [4 + 3 * i for i in range(10)]
    # Fewer rows than requests: rows are freed, moved and used again.
    engine = make_engine(model, max_batch_size=4)

    answers = generate(engine, [(p, {"max_new_tokens": n}) for p, n in zip(prompts, counts, strict=True)], greedy=True)

    assert isinstance(engine._loop.decoder, RowwiseDecoder if kind == "bloom" else SlottedDecoder)
    assert len({token for answer in answers for token in answer.output_tokens}) > 20
    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        assert answer.output_tokens == transformers_greedy(model, prompt, count)
        assert answer.stop_reason == "length"
        expected = reference_logprobs(model, prompt + answer.output_tokens, len(prompt))
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_greedy_when_200_ragged_prompts_equals_transformers_generate(
    kind, make_model, make_engine, generate, transformers_greedy
):
    model = make_model(kind)
    prompts = ragged_prompts(200, 120, seed=1)
    rng = random.Random(2)
    counts = [rng.randint(1, 16) for _ in prompts]
    engine = make_engine(model, max_batch_size=48)

    answers = generate(engine, [(p, {"max_new_tokens": n}) for p, n in zip(prompts, counts, strict=True)], greedy=True)

    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        assert answer.output_tokens == transformers_greedy(model, prompt, count)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_when_sampled_with_truncation_are_of_the_whole_distribution(
    temperature, model, make_engine, generate, reference_logprobs
):
    prompts = ragged_prompts(6, 20)
    engine = make_engine(model)

    answers = generate(engine, [(p, {"seed": i}) for i, p in enumerate(prompts)], temperature=temperature, top_k=5,
                       top_p=0.8, min_p=0.01, max_new_tokens=12)  # fmt: skip

    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_logprobs(model, prompt + answer.output_tokens, len(prompt), temperature)
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("computed_by")
def test_prefill_when_over_the_token_budget_gives_the_same_answers(model, make_engine, generate):
    jobs = [(p, {"seed": i}) for i, p in enumerate(ragged_prompts(9, 50))]
    whole = generate(make_engine(model), jobs, max_new_tokens=6)

    split = generate(make_engine(model, prefill_tokens=32), jobs, max_new_tokens=6)

    assert [a.output_tokens for a in split] == [a.output_tokens for a in whole]


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_prefill_when_a_prompt_spans_many_window_blocks_equals_a_forward(
    kind, make_model, make_engine, generate, reference_logprobs, monkeypatch, transformers_greedy
):
    monkeypatch.setattr("areal_local.attention._WINDOW_BLOCK", 16)
    model = make_model(kind)
    prompts = [ragged_prompts(1, 1)[0] * 61, list(range(90))]
    engine = make_engine(model)

    answers = generate(engine, [(prompt, {}) for prompt in prompts], greedy=True, max_new_tokens=3)

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.output_tokens == transformers_greedy(model, prompt, 3)
        expected = reference_logprobs(model, prompt + answer.output_tokens, len(prompt))
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("computed_by")
def test_cache_when_sequences_outgrow_it_keeps_what_is_stored(model, make_engine, generate, reference_logprobs):
    engine = make_engine(model)

    (answer,) = generate(engine, [([5, 6, 7], {})], max_new_tokens=240, greedy=True)

    assert answer.output_len == 240
    expected = reference_logprobs(model, [5, 6, 7, *answer.output_tokens], 3)
    torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_decoder_when_half_precision_is_used_and_close_to_a_forward(
    dtype, model, make_engine, generate, reference_logprobs
):
    engine = make_engine(model.to(dtype))

    (answer,) = generate(engine, [([1, 2, 3], {})], max_new_tokens=8, seed=0)

    assert isinstance(engine._loop.decoder, SlottedDecoder)
    expected = reference_logprobs(model, [1, 2, 3, *answer.output_tokens], 3)
    torch.testing.assert_close(torch.tensor(answer.output_logprobs), expected, rtol=0, atol=0.2)


def test_from_model_when_running_leaves_the_model_itself_usable(model, make_engine, generate):
    before = model(torch.tensor([[1, 2, 3]])).logits

    engine = make_engine(model)
    generate(engine, [([1, 2, 3], {})], max_new_tokens=4)

    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, before, rtol=0, atol=0)
    assert next(engine.model.parameters()).data_ptr() == next(model.parameters()).data_ptr()
