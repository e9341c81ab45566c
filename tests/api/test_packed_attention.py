"""The reference attention of native models, against the formula in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from areal_core.api.packed_attention import PackedAttention, packed_sdpa

LENGTHS = [5, 0, 1, 9, 4]
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 6


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    query, key, value = (
        torch.randn(total, *shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return query, key, value, bounds


def by_formula(query, key, value, scale, window, softcap):
    """One token and one head at a time."""
    outputs, first = [], 0
    for length in LENGTHS:
        for i in range(first, first + length):
            start = first if window is None else max(first, i - window + 1)
            heads = []
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = key[start : i + 1, kv] @ query[i, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                heads.append(torch.softmax(scores, 0) @ value[start : i + 1, kv])
            outputs.append(torch.stack(heads))
        first += length
    return torch.stack(outputs)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_packed_attention_when_ragged_equals_formula_with_gradients(scale, window, softcap):
    query, key, value, bounds = packed()
    attention = PackedAttention(0, scale=scale, window=window, softcap=softcap)

    found = attention(query, key, value, bounds, max(LENGTHS))
    grads = torch.autograd.grad(found.square().sum(), (query, key, value))

    expected = by_formula(query, key, value, HEAD_DIM**-0.5 if scale is None else scale, window, softcap)
    expected_grads = torch.autograd.grad(expected.square().sum(), (query, key, value))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-11)


def test_packed_attention_when_an_engine_sets_a_backend_expected_its_result_and_the_layer():
    query, key, value, bounds = packed()
    attention = PackedAttention(7, scale=2.0, window=4, softcap=None)
    calls = []

    def backend(layer, q, k, v, cu_seqlens, max_seqlen, tree):
        calls.append((layer.layer, layer.scale, layer.window, max_seqlen, tree))
        return q * 2

    attention.backend = backend

    found = attention(query, key, value, bounds, 9, "a tree")

    assert calls == [(7, 2.0, 4, 9, "a tree")]
    assert torch.equal(found, query * 2)


def test_packed_attention_when_bounds_miss_tokens_expected_an_error():
    query, key, value, bounds = packed()

    with pytest.raises(ValueError, match=f"ends at {sum(LENGTHS[:-1])}, but there are {sum(LENGTHS)} tokens"):
        PackedAttention(0)(query, key, value, bounds[:-1], max(LENGTHS))


def test_packed_attention_when_given_a_tree_expected_an_error_without_an_engine():
    query, key, value, bounds = packed()

    with pytest.raises(NotImplementedError, match="no trees"):
        PackedAttention(0)(query, key, value, bounds, max(LENGTHS), {"parents": []})


class Doubling(torch.nn.Module):
    """A backend that has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, attention, query, key, value, cu_seqlens, max_seqlen, tree_attn_meta):
        return query * self.factor


def test_packed_attention_when_the_backend_is_a_module_expected_no_part_of_the_model():
    query, key, value, bounds = packed()
    attention = PackedAttention(0)
    before = attention(query, key, value, bounds, 9)

    attention.backend = Doubling()
    found = attention(query, key, value, bounds, 9)
    names = [*attention.state_dict(), *dict(attention.named_parameters()), *dict(attention.named_children())]
    attention.backend = packed_sdpa

    assert torch.equal(found, query * 2)
    assert names == []
    assert torch.equal(attention(query, key, value, bounds, 9), before)


def test_packed_attention_when_copied_expected_its_settings_and_backend():
    query, key, value, bounds = packed()
    attention = PackedAttention(3, scale=0.7, window=3, softcap=2.0)

    copied = copy.deepcopy(attention.to("meta"))

    assert (copied.layer, copied.scale, copied.window, copied.softcap) == (3, 0.7, 3, 2.0)
    assert torch.equal(copied(query, key, value, bounds, 9), attention(query, key, value, bounds, 9))


def test_packed_attention_when_activations_are_recomputed_expected_equal_gradients():
    query, key, value, bounds = packed()
    attention = PackedAttention(0, window=3)

    kept = attention(query, key, value, bounds, 9)
    recomputed = checkpoint(attention, query, key, value, bounds, 9, use_reentrant=False)

    expected = torch.autograd.grad(kept.square().sum(), (query, key, value))
    found = torch.autograd.grad(recomputed.square().sum(), (query, key, value))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
