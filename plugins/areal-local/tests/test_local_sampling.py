"""Random numbers and sampling against exact distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_local.sampling import SamplingParams, sample, streams, uniform


def chi_squared_p(counts, expected):
    """p-value of observed counts against expected ones; cells that must be empty are asserted empty."""
    counts, expected = np.asarray(counts, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    # Rare cells are merged: the approximation needs about five expected hits.
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), torch.tensor(statistic / 2.0)))


def exact_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, token by token in Python floats: top-k, then top-p of the rest, then min-p."""
    scaled = [x / temperature for x in logits.double().tolist()]
    peak = max(scaled)
    p = [np.exp(x - peak) for x in scaled]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += p[i] / total
        if mass >= top_p:
            break
    kept = [i for i in kept if p[i] >= min_p * p[order[0]]]
    result = np.zeros(len(p))
    for i in kept:
        result[i] = p[i]
    return result / result.sum()


def draw(logits, count, **params):
    rows = logits.expand(count, -1)
    noise = uniform(streams(np.arange(count, dtype=np.uint64)), np.full(count, 7))
    return sample(rows, SamplingParams(uniforms=torch.from_numpy(noise), **params))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 0.01},
    ],
)
@pytest.mark.parametrize("vocab", [40, 1500])
def test_sample_when_options_truncate_follows_the_exact_distribution(vocab, options):
    count = 20_000 if vocab == 40 else 4_000
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 2
    types = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    params = {name: torch.full((count,), value, dtype=types[name]) for name, value in options.items()}

    tokens, _ = draw(logits, count, **params)

    expected = exact_distribution(logits, **options)
    assert chi_squared_p(np.bincount(tokens.numpy(), minlength=vocab), expected * count) > 1e-4


def test_sample_when_nucleus_is_wider_than_the_candidates_sorts_everything():
    vocab, count = 5000, 4000
    logits = torch.linspace(0, 1, vocab)

    tokens, _ = draw(logits, count, top_p=torch.full((count,), 0.9))

    expected = exact_distribution(logits, top_p=0.9)
    merged = np.add.reduceat(expected, range(0, vocab, 100)) * count
    assert int(tokens.min()) >= np.flatnonzero(expected)[0]
    assert chi_squared_p(np.add.reduceat(np.bincount(tokens, minlength=vocab), range(0, vocab, 100)), merged) > 1e-4


def test_sample_when_rows_mix_options_treats_each_alone():
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    noise = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    together = sample(
        logits,
        SamplingParams(
            uniforms=noise,
            temperature=torch.tensor([1.0, 0.7, 1.0]),
            greedy=torch.tensor([False, False, True]),
            top_k=torch.tensor([5, 0, 0]),
            top_p=torch.tensor([1.0, 0.5, 1.0]),
        ),
    )

    alone = [
        sample(logits[:1], SamplingParams(uniforms=noise[:1], top_k=torch.tensor([5]))),
        sample(
            logits[1:2],
            SamplingParams(uniforms=noise[1:2], temperature=torch.tensor([0.7]), top_p=torch.tensor([0.5])),
        ),
        sample(logits[2:], SamplingParams(uniforms=noise[2:], all_greedy=True)),
    ]

    assert together[0].tolist() == [int(tokens) for tokens, _ in alone]
    assert int(together[0][2]) == int(logits[2].argmax())
    torch.testing.assert_close(together[1], torch.cat([logprobs for _, logprobs in alone]), rtol=0, atol=0)


def test_sample_when_tokens_are_banned_never_takes_them_and_keeps_the_definition():
    logits = torch.tensor([5.0, 1.0, 0.0, -1.0])
    count = 2000

    tokens, logprobs = draw(logits, count, banned=(torch.arange(count), torch.zeros(count, dtype=torch.int64)))

    assert int(tokens.min()) > 0
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=1e-6)


def test_sample_when_penalised_follows_the_penalised_distribution():
    logits, count = torch.tensor([2.0, 1.0, 0.0]), 8000
    rows = torch.arange(count).repeat_interleave(2)

    tokens, logprobs = draw(
        logits,
        count,
        temperature=torch.full((count,), 0.5),
        penalties=(rows, torch.zeros(2 * count, dtype=torch.int64), torch.full((2 * count,), 0.75)),
    )

    expected = exact_distribution(torch.tensor([0.5, 1.0, 0.0]), temperature=0.5)
    assert chi_squared_p(np.bincount(tokens, minlength=3), expected * count) > 1e-4
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.5, -1)[tokens], rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab", [3, 2000])
def test_sample_when_the_uniform_number_is_extreme_takes_a_possible_token(value, vocab):
    logits = torch.full((1, vocab), float("-inf"))
    logits[0, 1:3] = 0.0

    token, _ = sample(logits, SamplingParams(uniforms=torch.tensor([value], dtype=torch.float64)))

    assert int(token) == (1 if value == 0 else 2)


@pytest.mark.parametrize("axis", ["seed", "position", "both"])
def test_uniform_when_counters_are_consecutive_is_uniform_and_uncorrelated(axis):
    count = 100_000
    counter = np.arange(count)
    seeds = (counter if axis != "position" else np.full(count, 3)).astype(np.uint64)
    positions = counter if axis != "seed" else np.full(count, 3)

    values = uniform(streams(seeds), positions)

    assert values.min() >= 0
    assert values.max() < 1
    assert chi_squared_p(np.bincount((values * 256).astype(int), minlength=256), np.full(256, count / 256)) > 1e-4
    pairs = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
    assert chi_squared_p(np.bincount(pairs[::2], minlength=256), np.full(256, len(pairs[::2]) / 256)) > 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(count)


def test_uniform_when_one_bit_of_the_seed_flips_changes_half_of_the_bits():
    base = np.array([0x0123456789ABCDEF], dtype=np.uint64)
    position = np.array([11])
    top = (uniform(streams(base), position) * 2**53).astype(np.uint64)

    flipped = [
        bin(int(top[0] ^ (uniform(streams(base ^ np.uint64(1 << bit)), position) * 2**53).astype(np.uint64)[0])).count(
            "1"
        )
        for bit in range(64)
    ]

    assert 24 < np.mean(flipped) < 29
    assert min(flipped) > 8


OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 1.6},
    {"temperature": 1.6, "top_k": 7},
    {"temperature": 1.6, "top_p": 0.8},
    {"temperature": 1.6, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_samples_when_drawn_through_the_engine_follow_the_exact_distribution(options, model, make_engine, generate):
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1]
    count = 2500
    engine = make_engine(model)

    answers = generate(
        engine, [([3, 1, 4, 1, 5], {"seed": seed}) for seed in range(count)], max_new_tokens=1, **options
    )

    counts = torch.bincount(torch.tensor([answer.output_tokens[0] for answer in answers]), minlength=97)
    assert chi_squared_p(counts, exact_distribution(logits, **options) * count) > 1e-4


@pytest.mark.parametrize(
    ("options", "mutated"),
    [
        ({"top_k": 7}, {"top_k": 8}),
        ({"top_k": 7}, {"top_k": 6}),
        ({"top_p": 0.8}, {"top_p": 0.83}),
        ({"top_p": 0.8}, {"top_p": 0.77}),
        ({"min_p": 0.1}, {"min_p": 0.13}),
        ({"min_p": 0.1}, {"min_p": 0.07}),
        ({"temperature": 1.6}, {"temperature": 1.2}),
    ],
)
def test_chi_squared_when_a_filter_is_slightly_off_rejects_the_samples(options, mutated, model, make_engine, generate):
    """The test above can fail: samples of a slightly different filter do not pass it."""
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1]
    temperature = {"temperature": 1.6}
    count = 2500
    expected = exact_distribution(logits, **{**temperature, **options})
    engine = make_engine(model)

    answers = generate(
        engine,
        [([3, 1, 4, 1, 5], {"seed": seed}) for seed in range(count)],
        max_new_tokens=1,
        **{**temperature, **mutated},
    )

    counts = torch.bincount(torch.tensor([answer.output_tokens[0] for answer in answers]), minlength=97).numpy()
    outside = counts[expected == 0].sum()
    assert outside > 0 or chi_squared_p(counts, expected * count) < 1e-4
