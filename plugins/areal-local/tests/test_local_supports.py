"""What truncation kept: ids and log-probs against the definition, in a batch of other requests, and over an update."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.errors import BadInputError
from areal_local.sampling import SamplingParams, sample, sample_from_candidates, streams, uniform

PROMPTS = [[3, 1, 4, 1, 5], [7, 7], [9, 1, 2], [8], [2, 4, 6, 8, 10, 12]]
KINDS = [
    {"top_k": 7},
    {"top_k": 30, "top_p": 0.8, "temperature": 1.4},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 12, "min_p": 0.2},
    {"top_k": 500, "top_p": 0.95},
]


def exact_support(logits, top_k, top_p=1.0, min_p=0.0, temperature=1.0):
    """``{id: log-prob over the support}`` by the definition, in Python floats: top-k, top-p of the rest, min-p."""
    p = torch.softmax(logits.double() / temperature, -1).tolist()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))[:top_k]
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i] / total
        if mass >= top_p:
            break
    kept = [i for i in kept if p[i] >= min_p * p[order[0]]]
    total = sum(p[i] for i in kept)
    return {i: float(np.log(p[i] / total)) for i in kept}


def params_of(count, options, **more):
    noise = uniform(streams(np.arange(count, dtype=np.uint64)), np.full(count, 7))
    dtypes = {name: torch.int64 if name == "top_k" else torch.float32 for name in options}
    tensors = {name: torch.full((count,), value, dtype=dtypes[name]) for name, value in options.items()}
    return SamplingParams(uniforms=torch.from_numpy(noise), **tensors, **more)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("vocab", [40, 1500])
def test_sample_when_supports_are_asked_for_gives_the_exact_ones_and_log_probs_over_them(vocab, options):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    count = 300

    tokens, logprobs, complete, kept = sample_from_candidates(
        logits.expand(count, -1), params_of(count, options, supports=torch.arange(count))
    )

    expected = exact_support(logits, **options)
    assert complete is None or bool(complete)
    assert all(row == kept[0].tolist() for row in kept.tolist())
    assert kept.shape[1] == min(vocab, options["top_k"])
    assert [i for i in kept[0].tolist() if i >= 0] == sorted(expected)
    assert kept[0].tolist() == sorted(expected) + [-1] * (kept.shape[1] - len(expected))
    torch.testing.assert_close(logprobs, torch.tensor([expected[i] for i in tokens.tolist()]), rtol=0, atol=2e-6)
    assert set(tokens.tolist()) <= set(expected)


def test_sample_when_tokens_tie_keeps_top_k_of_them_with_the_lowest_ids():
    # 3 above, then a tie of 8 from which two places are left.
    logits = torch.tensor([0.0, 1, 1, 2, 1, 1, 1, 2, 1, 1, 2, 1, -3])
    count = 4000

    tokens, logprobs, _, kept = sample_from_candidates(
        logits.expand(count, -1), params_of(count, {"top_k": 5}, supports=torch.arange(count))
    )

    assert kept[0].tolist() == [1, 2, 3, 7, 10]
    assert set(tokens.tolist()) == {1, 2, 3, 7, 10}
    shares = torch.softmax(logits[[1, 2, 3, 7, 10]], -1)
    for token, share in zip([1, 2, 3, 7, 10], shares, strict=True):
        assert abs((tokens == token).double().mean() - share) < 5 * (share * (1 - share) / count) ** 0.5
        torch.testing.assert_close(logprobs[tokens == token][0], share.log(), rtol=0, atol=1e-6)


def test_sample_when_rows_mix_gives_each_what_it_gets_alone():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 2
    logits = logits.half().float()  # ties
    noise = torch.tensor([0.2, 0.5, 0.7, 0.9], dtype=torch.float64)
    top_k, top_p = torch.tensor([40, 0, 9, 25]), torch.tensor([0.9, 0.5, 1.0, 1.0])
    greedy = torch.tensor([False, False, False, True])
    supports = torch.tensor([0, 2])

    tokens, logprobs, _, kept = sample_from_candidates(
        logits, SamplingParams(uniforms=noise, top_k=top_k, top_p=top_p, greedy=greedy, supports=supports)
    )

    for row in range(4):
        wanted = torch.tensor([0]) if row in (0, 2) else None
        one = slice(row, row + 1)
        alone = sample_from_candidates(
            logits[one],
            SamplingParams(
                uniforms=noise[one], top_k=top_k[one], top_p=top_p[one], greedy=greedy[one], supports=wanted
            ),
        )
        assert tokens[row] == alone[0][0]
        torch.testing.assert_close(logprobs[row], alone[1][0], rtol=0, atol=1e-6)
        if wanted is not None:
            assert [i for i in kept[row // 2].tolist() if i >= 0] == [i for i in alone[3][0].tolist() if i >= 0]
    # Rows that did not ask keep the log-prob over the vocabulary.
    torch.testing.assert_close(logprobs[1::2], torch.log_softmax(logits, -1)[[1, 3], tokens[1::2]], rtol=0, atol=0)


def test_sample_when_tokens_are_banned_leaves_them_out_of_the_support():
    logits = torch.tensor([[5.0, 1.0, 0.0, -1.0]])

    _, logprobs, _, kept = sample_from_candidates(
        logits,
        params_of(1, {"top_k": 2}, supports=torch.tensor([0]), banned=(torch.tensor([0]), torch.tensor([0]))),
    )

    assert kept.tolist() == [[1, 2]]
    assert any(torch.isclose(logprobs[0], x) for x in torch.log_softmax(logits[0, 1:3], -1))


def test_sample_when_supports_are_asked_for_draws_the_same_tokens_where_nothing_ties():
    logits = torch.randn(500, 200, generator=torch.Generator().manual_seed(2)) * 2
    options = {"top_k": 20, "top_p": 0.9}

    plain, _ = sample(logits, params_of(500, options))
    tokens, _ = sample(logits, params_of(500, options, supports=torch.arange(500)))

    assert torch.equal(tokens, plain)


def check(model, prompt, answer, kind, start=0, end=None):
    """Tokens ``start`` to ``end`` of an answer: supports and log-probs are those of ``model``."""
    end = answer.output_len if end is None else end
    tokens = [*prompt, *answer.output_tokens]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    for at in range(start, end):
        expected = exact_support(logits[len(prompt) + at - 1], **kind)
        kept = [i for i in answer.output_supports[at].tolist() if i >= 0]
        assert kept == sorted(expected)
        assert abs(answer.output_logprobs[at] - expected[answer.output_tokens[at]]) < 2e-5


def test_supports_when_asked_for_are_those_of_the_model_and_equal_in_a_process(hosts, make_model, generate):
    model = make_model("qwen3", seed=5)
    jobs = [
        (prompt, {**kind, "seed": i, "max_new_tokens": 5 + i, "return_supports": True})
        for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
    ]
    jobs += [([4, 4], {"top_k": 5, "seed": 9, "max_new_tokens": 6}), ([4, 4], {"greedy": True, "max_new_tokens": 7})]
    answers = {}

    for mode in ("thread", "process"):
        engine = hosts(mode)
        engine.update_weights_from_memory(model.named_parameters(), 3)
        answers[mode] = generate(engine, jobs)

    for prompt, kind, answer in zip(PROMPTS, KINDS, answers["thread"], strict=False):
        assert answer.output_supports.dtype == np.int32
        assert len(answer.output_supports) == answer.output_len
        check(model, prompt, answer, kind)
    assert [answer.output_supports for answer in answers["thread"][5:]] == [None, None]
    for one, other in zip(answers["thread"], answers["process"], strict=True):
        assert one.output_tokens == other.output_tokens and one.output_logprobs == other.output_logprobs
        np.testing.assert_array_equal(one.output_supports, other.output_supports)


def test_supports_when_weights_change_in_the_middle_are_of_the_version_that_sampled(host_engine, make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    kind = {"top_k": 10, "top_p": 0.9}

    async def main():
        host_engine.pause_generation()
        lengths = [5, 150, 150]
        tasks = [
            asyncio.ensure_future(
                host_engine.agenerate(
                    ModelRequest(
                        input_ids=prompt,
                        gconfig=GenerationHyperparameters(max_new_tokens=length, seed=length, **kind),
                        return_supports=True,
                    )
                )
            )
            for prompt, length in zip(PROMPTS, lengths, strict=False)
        ]
        await asyncio.sleep(0)
        host_engine.continue_generation()
        await tasks[0]
        host_engine.pause_generation()
        host_engine.update_weights_from_memory(new.named_parameters(), 1)
        host_engine.continue_generation()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(main())

    for prompt, answer in zip(PROMPTS[1:], answers[1:], strict=False):
        cut = answer.output_versions.count(0)
        assert 5 <= cut < 150
        check(old, prompt, answer, kind, 0, cut)
        check(new, prompt, answer, kind, cut)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 1025}, {"top_k": 5, "greedy": True}])
def test_supports_when_they_have_no_bound_are_refused(host_engine, generate, fields):
    with pytest.raises(BadInputError, match=r"return_supports.*gconfig\.top_k.*1024"):
        generate(host_engine, [([1, 2], {**fields, "return_supports": True})])
