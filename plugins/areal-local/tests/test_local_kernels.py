"""The compiled loops, each against its formula in fp64."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from areal_local import compiled, kernels
from areal_local.compiled import SlottedAttention, kernels_for, sample_plain
from areal_local.sampling import SamplingParams, sample, streams, uniform

CAPACITY = 64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_in_fp64(query, keys, values, scale, window):
    """Query ``[heads, D]`` at the end of keys and values ``[kv_heads, T, D]``."""
    group = len(query) // len(keys)
    keys, values = (x[:, -window:].double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = (keys @ query.double()[:, :, None])[:, :, 0] * scale
    return (torch.softmax(scores, dim=-1)[:, None] @ values)[:, 0]


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(8, 2, 1), (16, 1, 7), (32, 2, 2), (64, 3, 3), (80, 1, 16), (6, 2, 2)]
)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_when_rows_are_ragged_equals_the_formula(head_dim, kv_heads, group, window, threads, monkeypatch):
    monkeypatch.setattr(compiled, "_KEYS_PER_THREAD", 1)
    positions = np.array([0, 1, 6, 7, 8, 15, 40, 63, 0, 23])
    rows = np.array([3, 0, 1, 2, 4, 5, 9, 7, 8, 6])
    heads = kv_heads * group
    before_keys, before_values = (random(10, kv_heads, CAPACITY, head_dim, seed=seed) for seed in (1, 2))
    keys, values = before_keys.clone(), before_values.clone()
    query, key, value = (random(10, n, head_dim, seed=3 + i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    attend = SlottedAttention(kernels, rows, positions, threads)
    assert attend.takes(query, key, value, None)

    found = attend(query, key, value, (keys, values), 0.3, window)

    for n, (row, position) in enumerate(zip(rows, positions, strict=True)):
        before_keys[row, :, position], before_values[row, :, position] = key[n], value[n]
        seen = (before_keys[row, :, : position + 1], before_values[row, :, : position + 1])
        expected = attention_in_fp64(query[n], *seen, 0.3, window or CAPACITY)
        torch.testing.assert_close(found[n].double(), expected, rtol=1e-5, atol=1e-6)
    # Nothing but the new tokens was stored.
    torch.testing.assert_close(keys, before_keys, rtol=0, atol=0)
    torch.testing.assert_close(values, before_values, rtol=0, atol=0)


def test_attention_when_heads_do_not_follow_each_other_gives_the_same():
    rows, positions = np.arange(4), np.array([3, 9, 17, 30])
    cached = random(4, 2, CAPACITY, 16, seed=1), random(4, 2, CAPACITY, 16, seed=2)
    query, key, value = (random(4, n, 16, seed=n) for n in (4, 2, 2))
    apart = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (query, key, value)]
    assert apart[0].stride() != query.stride()

    found = SlottedAttention(kernels, rows, positions, 1)(*apart, cached, None, None)

    expected = SlottedAttention(kernels, rows, positions, 1)(query, key, value, cached, None, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_attention_when_another_type_is_the_default_computes_in_its_own():
    attend = SlottedAttention(kernels, np.arange(1), np.array([4]), 1)
    tensors = [random(1, 2, 16, seed=seed) for seed in range(3)]
    cached = random(1, 2, CAPACITY, 16, seed=3), random(1, 2, CAPACITY, 16, seed=4)
    expected = attend(*tensors, cached, None, None)

    # As transformers does while it loads a model, for all threads.
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attend(*tensors, cached, None, None)
    finally:
        torch.set_default_dtype(torch.float32)

    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("query", "key", "value", "softcap"),
    [
        ((2, 4, 16), (2, 2, 16), (2, 2, 16), 30.0),
        ((2, 4, 16), (2, 2, 16), (2, 2, 8), None),
        ((2, 34, 16), (2, 2, 16), (2, 2, 16), None),
    ],
    ids=["softcap", "values-of-another-size", "17-heads-of-a-key"],
)
def test_takes_when_attention_is_of_another_kind_says_no(query, key, value, softcap):
    attend = SlottedAttention(kernels, np.arange(2), np.arange(2), 1)

    assert not attend.takes(*(torch.zeros(shape) for shape in (query, key, value)), softcap)


@pytest.mark.parametrize("size", [5, 128, 576])
def test_rms_norm_when_given_ragged_values_equals_the_formula(size):
    hidden, weight = random(7, size) * 3, random(size, seed=1)
    out = torch.empty(7, size)

    kernels.rms_norm(hidden.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())

    x = hidden.double()
    expected = weight.double() * x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_silu_mul_when_gates_are_extreme_equals_the_formula():
    gate_up = random(9, 20) * 20
    gate_up[0, :4] = torch.tensor([-200.0, -88.0, 88.0, 200.0])
    out = torch.empty(9, 10)

    kernels.silu_mul(gate_up.numpy(), out.numpy())

    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(out.double(), gate * torch.sigmoid(gate) * up, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("normed", [True, False])
def test_rotate_when_heads_have_norms_or_not_equals_the_formula(normed):
    size, heads = 12, 5
    qkv, weight = random(6, heads + 2, size), random(heads, size, seed=1)
    positions = torch.tensor([0, 3, 1, 9, 4, 4])
    angles = torch.arange(10)[:, None].double() / 100 ** (torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos(), angles.sin()
    rope = torch.cat((cos, cos, -sin, sin), dim=-1).float()
    out = torch.empty(6, heads, size)

    given = weight.numpy() if normed else np.empty((0, 1), dtype=np.float32)
    kernels.rotate(qkv.numpy(), given, np.float32(1e-5), rope.numpy(), positions.numpy(), out.numpy())

    x = qkv[:, :heads].double()
    if normed:
        x = weight.double() * x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    # Each pair (d, d + size / 2) is a complex number that is turned by its angle.
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    torch.testing.assert_close(out.double(), torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-6)


def test_uniform_when_compiled_is_the_same_number():
    rng = np.random.default_rng(0)
    starts = streams(rng.integers(0, 2**63, 1000).astype(np.uint64))
    positions = rng.integers(0, 2**40, 1000)

    found = compiled.fast_uniform(torch.device("cpu"), starts, positions)

    np.testing.assert_array_equal(found, uniform(starts, positions))


@pytest.mark.parametrize("vocab", [3, 128, 391, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sample_plain_when_given_uniform_numbers_inverts_the_distribution(vocab, temperature):
    logits = random(400, vocab) * 3
    noise = uniform(streams(np.arange(400, dtype=np.uint64)), np.arange(400))
    temperatures = torch.full((400,), temperature)

    tokens, logprobs = sample_plain(kernels, logits, temperatures, None, torch.from_numpy(noise))

    exact = torch.log_softmax(logits.double() / temperature, dim=-1)
    upper = exact.exp().cumsum(dim=-1)
    index = torch.from_numpy(tokens)[:, None]
    above = upper.gather(1, index)[:, 0].numpy()
    below = above - exact.gather(1, index).exp()[:, 0].numpy()
    assert ((below - 1e-6 <= noise) & (noise <= above + 1e-6)).all()
    torch.testing.assert_close(torch.from_numpy(logprobs).double(), exact.gather(1, index)[:, 0], rtol=1e-6, atol=2e-6)


def test_sample_plain_when_rows_are_greedy_takes_the_first_of_the_likeliest():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    greedy = torch.tensor([True, True])

    tokens, logprobs = sample_plain(kernels, logits, None, greedy, torch.full((2,), 0.99, dtype=torch.float64))

    assert tokens.tolist() == [1, 0]
    expected, values = sample(logits, SamplingParams(uniforms=torch.zeros(2).double(), all_greedy=True))
    assert expected.tolist() == tokens.tolist()
    torch.testing.assert_close(torch.from_numpy(logprobs), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("vocab", [5, 700])
def test_sample_plain_when_the_uniform_number_is_extreme_takes_a_possible_token(value, vocab):
    logits = torch.full((1, vocab), float("-inf"))
    logits[0, 2:4] = torch.tensor([0.5, 0.1])

    tokens, logprobs = sample_plain(kernels, logits, None, None, torch.tensor([value], dtype=torch.float64))

    assert tokens.tolist() == [2 if value == 0 else 3]
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [True, False])
def test_sample_plain_when_a_logit_is_not_finite_gives_no_log_prob(bad, greedy):
    logits = random(3, 40)
    logits[1, 33] = bad
    rows = torch.tensor([greedy] * 3)

    _, logprobs = sample_plain(kernels, logits, None, rows, torch.full((3,), 0.2, dtype=torch.float64))

    assert np.isnan(logprobs).tolist() == [False, True, False]


def test_kernels_for_when_numba_is_missing_warns_once_and_leaves_it_to_torch(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "areal_local.kernels")
    monkeypatch.delattr("areal_local.kernels")
    compiled._kernels.cache_clear()
    try:
        found = [kernels_for(torch.device("cpu"), torch.float32) for _ in range(2)]
    finally:
        compiled._kernels.cache_clear()

    assert found == [None, None]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "numba" in caplog.text


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("meta", torch.float32)])
def test_kernels_for_when_not_fp32_on_a_cpu_gives_none(device, dtype):
    assert kernels_for(torch.device(device), dtype) is None
