"""Attention plans against attention written out row by row."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import fsdp_cases as cases
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from areal_fsdp import attention
from areal_fsdp.attention import make_plan, varlen_attention
from areal_fsdp.layout import make_model_input


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    prefixes: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``[N, H, D]`` in fp64: every query row over the list of rows that it may see."""
    out = torch.zeros_like(q)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    start = 0
    for length, (prefix, prefix_len) in zip(lengths, prefixes, strict=True):
        rows = [*range(prefix, prefix + prefix_len), *range(start, start + length)]
        for i in range(length):
            seen = rows[: prefix_len + i + 1]
            seen = seen[-window:] if window is not None else seen
            scores = torch.einsum("hd,khd->hk", q[start + i], k[seen]) * q.shape[-1] ** -0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[start + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
        start += length
    return out


LENGTHS = [9, 1, 4, 4, 2, 7, 1, 12, 3]
PREFIXES = [(0, 0), (0, 9), (0, 9), (0, 0), (14, 4), (14, 4), (0, 9), (0, 0), (31, 12)]


@pytest.mark.parametrize("window", [None, 1, 3, 10])
@pytest.mark.parametrize(("softcap", "prefixed"), [(None, True), (None, False), (1.5, True)])
def test_varlen_attention_when_ragged_expected_row_by_row_result_and_gradient(
    window: int | None, softcap: float | None, prefixed: bool
) -> None:
    torch.manual_seed(0)
    prefixes = PREFIXES if prefixed else [(0, 0)] * len(LENGTHS)
    tensors = [torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected_inputs = [t.clone().requires_grad_() for t in tensors]
    inputs = [t.clone().requires_grad_() for t in tensors]
    weights = torch.randn(sum(LENGTHS), 4, 8, dtype=torch.float64)
    expected = naive_attention(*expected_inputs, LENGTHS, prefixes, window, softcap)
    (expected * weights).sum().backward()

    query, key, value = (t.transpose(0, 1)[None] for t in inputs)
    out, _ = varlen_attention(
        nn.Identity(), query, key, value, None, sliding_window=window, softcap=softcap,
        areal_plan=make_plan(LENGTHS, prefixes),
    )  # fmt: skip
    (out[0] * weights).sum().backward()

    assert_close(out[0], expected, rtol=1e-10, atol=1e-10)
    for actual, reference in zip(inputs, expected_inputs, strict=True):
        assert_close(actual.grad, reference.grad, rtol=1e-10, atol=1e-10)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """What flash-attn documents of its function: query i of a sequence is aligned with key i + (keys - queries)."""
    assert causal and dropout_p == 0 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out = torch.zeros(len(q), q.shape[1], v.shape[-1], dtype=q.dtype)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    for i in range(len(cu_seqlens_q) - 1):
        queries = range(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        keys = range(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        assert len(queries) <= max_seqlen_q and len(keys) <= max_seqlen_k
        for place, row in enumerate(queries):
            last = place + len(keys) - len(queries)
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            seen = list(keys)[first : last + 1]
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            scores = torch.einsum("hd,khd->hk", q[row], k[seen]) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "prefixed"), [(None, True), (None, False), (1.5, True)])
def test_flash_varlen_when_ragged_expected_arguments_that_mean_the_same(
    window: int | None, softcap: float | None, prefixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    torch.manual_seed(0)
    prefixes = PREFIXES if prefixed else [(0, 0)] * len(LENGTHS)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))

    out = attention._flash_varlen(q, k, v, make_plan(LENGTHS, prefixes), None, 0.0, window, softcap)

    assert_close(out, naive_attention(q, k, v, LENGTHS, prefixes, window, softcap), rtol=1e-10, atol=1e-10)


def test_varlen_attention_when_plan_is_missing_expected_error() -> None:
    x = torch.zeros(1, 1, 2, 4)

    with pytest.raises(RuntimeError, match="attn_impl=sdpa"):
        varlen_attention(nn.Identity(), x, x, x, None)


def test_make_plan_when_many_short_segments_expected_few_buckets_and_little_padding() -> None:
    lengths = (25 + torch.arange(256) % 30).tolist()

    plan = make_plan(lengths, [(0, 0)] * 256)

    assert len(plan.buckets) <= 6
    assert sum(b.n * b.queries for b in plan.buckets) < 1.2 * sum(lengths)


def test_make_plan_when_lengths_differ_widely_expected_little_padding() -> None:
    lengths = [*range(1, 400), 8000, 4000]

    plan = make_plan(lengths, [(0, 0)] * len(lengths))

    assert len(plan.buckets) < 40
    assert sum(b.n * b.queries for b in plan.buckets) < 1.2 * sum(lengths)


def test_make_model_input_when_prompts_are_shared_expected_one_copy_and_positions_that_go_on() -> None:
    batch = cases.make_batch([[2, 3], [1]], prompt=(4, 5))

    inputs = make_model_input(batch, share_prompts=True)

    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4]
    ids = batch.tokens["input_ids"]
    assert torch.equal(inputs.input_ids, torch.cat([ids[:6], ids[10:13], ids[13:]]))
    # The first completion token of both samples comes from the prompt's last row.
    assert inputs.rows.tolist() == [3, 4, 3, 6, 7, 12]
    assert torch.equal(inputs.targets, ids[batch.tokens["loss_mask"]])
    assert torch.equal(inputs.token_index, batch.tokens["loss_mask"].nonzero()[:, 0])
