"""What a request may ask for, and what it is refused."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.errors import ArealError, BadInputError
from areal_local.engine import LocalEngine

PROMPT = [3, 1, 4, 1, 5]


class LetterTokenizer:
    """Id i is the letter chr(97 + i % 26)."""

    eos_token_id = None
    pad_token_id = None

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + i % 26) for i in ids)


def greedy_tokens(engine, generate, count=20):
    return generate(engine, [(PROMPT, {"max_new_tokens": count})], greedy=True, ignore_eos=True)[0].output_tokens


def test_seed_when_batch_and_order_differ_gives_the_same_sample(model, make_engine, generate):
    rng = random.Random(0)
    others = [([rng.randrange(97) for _ in range(rng.randint(1, 30))], {"max_new_tokens": 9}) for _ in range(12)]
    engine = make_engine(model, max_batch_size=8)
    alone = generate(engine, [(PROMPT, {"seed": 42, "max_new_tokens": 15})])[0]

    crowd = generate(engine, [*others, (PROMPT, {"seed": 42, "max_new_tokens": 15}), *others[:3]])[12]

    assert crowd.output_tokens == alone.output_tokens


def test_seed_when_different_or_absent_gives_different_samples(model, make_engine, generate):
    engine = make_engine(model)

    answers = generate(engine, [(PROMPT, {"seed": i}) for i in range(4)] + [(PROMPT, {})] * 4, max_new_tokens=12)

    assert len({tuple(answer.output_tokens) for answer in answers}) == 8


@pytest.mark.parametrize("seed", [-1, 2**64 + 5, 0])
def test_seed_when_any_python_integer_is_accepted(seed, model, make_engine, generate):
    first, second = generate(make_engine(model), [(PROMPT, {"seed": seed})] * 2, max_new_tokens=8)

    assert first.output_tokens == second.output_tokens


def test_run_when_repeated_with_the_engine_seed_is_bitwise_equal(model, make_engine, generate):
    jobs = [([i, i + 1], {"max_new_tokens": 3 + i}) for i in range(12)]

    runs = [generate(make_engine(model, max_batch_size=5, seed=9), jobs) for _ in range(2)]

    for first, second in zip(*runs, strict=True):
        assert first.output_tokens == second.output_tokens
        assert first.output_logprobs == second.output_logprobs


def test_sharing_when_prompts_are_equal_prefills_once_and_changes_nothing(model, make_engine, generate):
    shared = make_engine(model)
    answers = generate(shared, [(PROMPT, {"seed": i}) for i in range(8)] + [([7, 7], {"seed": 0})], max_new_tokens=10)

    stats = shared.export_stats()
    alone = make_engine(model, max_batch_size=1)
    separate = generate(alone, [(PROMPT, {"seed": i}) for i in range(8)] + [([7, 7], {"seed": 0})], max_new_tokens=10)

    assert stats["prefill_tokens"] == len(PROMPT) + 2
    assert stats["shared_prefill_tokens"] == 7 * len(PROMPT)
    for one, other in zip(answers, separate, strict=True):
        assert one.output_tokens == other.output_tokens
        torch.testing.assert_close(
            torch.tensor(one.output_logprobs), torch.tensor(other.output_logprobs), rtol=0, atol=1e-5
        )


def test_stop_id_when_sampled_ends_the_answer_with_it(model, make_engine, generate):
    engine = make_engine(model)
    tokens = greedy_tokens(engine, generate)
    stop = tokens[7]

    (answer,) = generate(engine, [(PROMPT, {"stop_token_ids": [stop, 10**9]})], greedy=True, max_new_tokens=20)

    assert answer.output_tokens == tokens[: tokens.index(stop) + 1]
    assert answer.stop_reason == "stop"
    assert len(answer.output_logprobs) == len(answer.output_versions) == answer.output_len


@pytest.mark.parametrize("ignore", [False, True])
def test_eos_when_the_tokenizer_has_one_ends_the_answer_unless_ignored(ignore, model, make_engine, generate):
    tokens = greedy_tokens(make_engine(model), generate)
    tokenizer = LetterTokenizer()
    tokenizer.eos_token_id = tokens[5]
    engine = make_engine(model, tokenizer=tokenizer)

    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=20, ignore_eos=ignore)

    assert answer.output_tokens == (tokens if ignore else tokens[: tokens.index(tokens[5]) + 1])


def test_min_new_tokens_when_a_stop_id_is_likely_bans_it_until_then(model, make_engine, generate):
    engine = make_engine(model)
    stop = greedy_tokens(engine, generate)[0]

    (answer,) = generate(
        engine,
        [(PROMPT, {"stop_token_ids": [stop, 10**9], "min_new_tokens": 6})],
        greedy=True,
        max_new_tokens=20,
    )

    assert stop not in answer.output_tokens[:6]
    assert answer.output_len >= 6


def test_min_new_tokens_when_reached_bans_nothing_any_more(model, make_engine, generate):
    # Arrange: every id but one stops. Until the minimum that one is all that may be sampled; then another is likelier.
    for only in range(97):
        with torch.no_grad():
            best = int(model(torch.tensor([[*PROMPT, *[only] * 6]])).logits[0, -1].argmax())
        if best != only:
            break
    stops = [token for token in range(97) if token != only]

    # Act
    (answer,) = generate(
        make_engine(model), [(PROMPT, {"stop_token_ids": stops, "min_new_tokens": 6})], greedy=True, max_new_tokens=20
    )

    # Assert
    assert answer.output_tokens == [only] * 6 + [best]
    assert answer.stop_reason == "stop"


def test_stop_when_at_the_last_token_that_was_allowed_is_the_reason(model, make_engine, generate):
    engine = make_engine(model, tokenizer=LetterTokenizer())
    tokens = greedy_tokens(engine, generate)
    size = tokens.index(tokens[4]) + 1
    string = LetterTokenizer().decode(tokens[:size])

    answers = generate(
        engine, [(PROMPT, {"stop_token_ids": [tokens[4]]}), (PROMPT, {"stop": [string]})], greedy=True,
        max_new_tokens=size,
    )  # fmt: skip

    for answer in answers:
        assert (answer.output_tokens, answer.stop_reason, answer.truncated) == (tokens[:size], "stop", False)


def test_stop_string_when_it_appears_ends_the_answer_at_its_last_token(model, make_engine, generate):
    tokenizer = LetterTokenizer()
    engine = make_engine(model, tokenizer=tokenizer)
    tokens = greedy_tokens(engine, generate)
    text = tokenizer.decode(tokens)
    stop = text[8:11]

    answers = generate(
        engine, [(PROMPT, {"stop": ["ABSENT", stop]}), (PROMPT, {"stop": ["ABSENT"]})], greedy=True, max_new_tokens=20
    )

    end = text.index(stop) + len(stop)
    assert answers[0].output_tokens == tokens[:end]
    assert answers[0].stop_reason == "stop"
    assert answers[1].output_tokens == tokens
    assert answers[1].stop_reason == "length"


def test_stop_string_when_before_the_minimum_does_not_end_the_answer(model, make_engine, generate):
    tokenizer = LetterTokenizer()
    engine = make_engine(model, tokenizer=tokenizer)
    tokens = greedy_tokens(engine, generate)
    text = tokenizer.decode(tokens)
    stop, minimum = text[1:3], 6

    (answer,) = generate(
        engine, [(PROMPT, {"stop": [stop], "min_new_tokens": minimum})], greedy=True, max_new_tokens=20
    )

    end = next((end for end in range(minimum, 21) if text[:end].endswith(stop)), 20)
    assert answer.output_tokens == tokens[:end]


def test_stop_string_when_the_tokenizer_raises_fails_that_request_only(model, make_engine, generate):
    class Broken(LetterTokenizer):
        def decode(self, ids, skip_special_tokens=False):
            raise KeyError("no such id")

    engine = make_engine(model, tokenizer=Broken())

    with pytest.raises(KeyError):
        generate(engine, [(PROMPT, {"stop": ["x"]})])

    assert generate(engine, [(PROMPT, {})], max_new_tokens=4)[0].output_len == 4


def test_frequency_penalty_when_high_avoids_repetition(model, make_engine, generate):
    engine = make_engine(model)

    (answer,) = generate(engine, [(PROMPT, {"frequency_penalty": 2.0})], max_new_tokens=60, temperature=0.2, seed=0)
    (without,) = generate(engine, [(PROMPT, {})], max_new_tokens=60, temperature=0.2, seed=0)

    assert len(set(answer.output_tokens)) > len(set(without.output_tokens))


def test_frequency_penalty_when_greedy_counts_each_token_that_was_generated(model, make_engine, generate):
    # Arrange: by the definition, a forward pass for each token
    expected, counts = list(PROMPT), torch.zeros(97)
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([expected])).logits[0, -1]
        expected.append(int((logits - 0.75 * counts).argmax()))
        counts[expected[-1]] += 1

    # Act
    (answer,) = generate(make_engine(model), [(PROMPT, {"frequency_penalty": 0.75})], greedy=True, max_new_tokens=30)

    # Assert
    assert answer.output_tokens == expected[len(PROMPT) :]
    assert counts.max() > 1 and answer.output_tokens != greedy_tokens(make_engine(model), generate, 30)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": len(PROMPT) + 4}, 4),
        ({"max_new_tokens": 1}, 1),
        ({"max_new_tokens": 100_000}, 64 - len(PROMPT)),
    ],
)
def test_length_when_limited_is_exact(fields, expected, model, make_engine, generate):
    engine = make_engine(model, max_seq_len=64)

    (answer,) = generate(engine, [(PROMPT, fields)])

    assert answer.output_len == expected
    assert answer.stop_reason == "length"
    assert answer.truncated


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([1] * 256, {}, ["256 tokens", "the context is 256", "at most 255", "max_length"]),
        ([1] * 10, {"max_tokens": 10}, ["10 tokens", "max_tokens is 10"]),
        ([], {}, ["empty"]),
        ([1, 97], {}, ["vocabulary of 97"]),
        ([-1], {}, ["vocabulary of 97"]),
        ([1], {"n_samples": 2}, ["n_samples is 2"]),
        ([1], {"stop": ["x"]}, ["tokenizer"]),
    ],
)
def test_request_when_it_can_never_work_names_what_is_wrong(prompt, fields, words, model, make_engine, generate):
    engine = make_engine(model)

    with pytest.raises(BadInputError) as caught:
        generate(engine, [(prompt, fields)])

    for word in words:
        assert word in str(caught.value)
    assert generate(engine, [([1], {})], max_new_tokens=2)[0].output_len == 2


def test_initialize_when_given_a_folder_loads_it_and_a_bad_one_is_an_error(model, tmp_path, generate):
    model.save_pretrained(tmp_path / "model")
    engine = LocalEngine(InferenceEngineConfig(dtype="float32"))

    with pytest.raises(BadInputError, match="nothing-here"):
        engine.initialize(str(tmp_path / "nothing-here"))
    engine.initialize(str(tmp_path / "model"))
    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=5)
    engine.destroy()

    with torch.no_grad():
        expected = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, 5), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    assert answer.output_tokens == expected[0, 5:].tolist()


def test_initialize_when_weights_are_pickled_is_an_error(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(BadInputError, match="safetensors"):
        LocalEngine(InferenceEngineConfig(dtype="float32")).initialize(str(tmp_path))


def test_initialize_when_a_tensor_is_missing_names_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(BadInputError, match=r"1 tensors are missing.*layers\.1\.mlp\.up_proj"):
        LocalEngine(InferenceEngineConfig(dtype="float32")).initialize(str(tmp_path))


async def test_agenerate_when_the_engine_is_not_running_says_so():
    engine = LocalEngine(InferenceEngineConfig())

    with pytest.raises(ArealError, match="not initialised"):
        await engine.agenerate(ModelRequest(input_ids=[1]))


async def test_agenerate_when_thousands_are_submitted_answers_all(model, make_engine):
    engine = make_engine(model)
    gconfig = GenerationHyperparameters(max_new_tokens=1)

    answers = await asyncio.gather(
        *[engine.agenerate(ModelRequest(input_ids=[i % 97], gconfig=gconfig)) for i in range(3000)]
    )

    assert [answer.input_tokens[0] for answer in answers] == [i % 97 for i in range(3000)]
    assert {answer.output_len for answer in answers} == {1}
