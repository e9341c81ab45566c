"""Attention over a packed batch: no token attends outside its own sequence, and nothing is padded but inside a bucket.

A *segment* is a run of query rows of the packed input. It attends to its optional *prefix* rows (a prompt that
several completions share), all of which come before it, and causally to itself. Segments of similar size make a
*bucket*, which is one batched call of scaled dot-product attention.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from areal_fsdp.ulysses import Ulysses

#: The name under which ``varlen_attention`` is registered with transformers.
ATTENTION_NAME = "areal_varlen"

# What one more batched call costs, in padded (query + key) rows; from measurements on a CPU, where a call of SDPA with
# its gathers takes about 0.1 ms and a gathered row of a few hundred floats 0.2 us.
_CALL_COST_ROWS = 512.0
# Score entries that cost as much as one row.
_SCORES_PER_ROW = 64.0
# With more candidates for a bucket's end than this, lengths that differ by less than the share below count as one.
_MAX_CANDIDATES = 64
_SAME_LENGTH = 0.05

Ints: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Bucket:
    """``n`` segments, ``C`` padded queries, ``K`` padded keys.

    Attributes:
        query_rows: int64 ``[n * C]``, rows of the packed input; padding repeats a row of the segment.
        key_rows: int64 ``[n * K]``, prefix first, then the segment itself; None where equal to ``query_rows``.
        prefix: int64 ``[n]``, length of each prefix; None when no segment has one.
    """

    n: int
    queries: int
    keys: int
    query_rows: torch.Tensor
    key_rows: torch.Tensor | None
    prefix: torch.Tensor | None


@attrs.define(eq=False)
class AttentionPlan:
    """How the rows of one packed micro-batch attend to each other.

    Attributes:
        buckets: together they hold every row as a query once.
        out_rows: int64 ``[N]``: where row ``i`` stands in the concatenated outputs of the buckets.
        ulysses: set where each context-parallel rank brings a part of the rows; the plan is that of all rows.
        cu_queries, cu_keys, varlen_keys: the same for a varlen kernel: int32 bounds of each segment's queries (which
            lie in order) and keys, and the key rows (None: equal to the queries).
    """

    buckets: list[Bucket]
    out_rows: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    varlen_keys: torch.Tensor | None
    max_queries: int
    max_keys: int
    ulysses: Ulysses | None = None
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = attrs.field(factory=dict)

    def to(self, device: torch.device) -> AttentionPlan:
        def move(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.to(device, non_blocking=True)

        return attrs.evolve(
            self,
            buckets=[
                attrs.evolve(b, query_rows=move(b.query_rows), key_rows=move(b.key_rows), prefix=move(b.prefix))
                for b in self.buckets
            ],
            out_rows=move(self.out_rows),
            cu_queries=move(self.cu_queries),
            cu_keys=move(self.cu_keys),
            varlen_keys=move(self.varlen_keys),
            masks={},
        )

    def mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask ``[n, 1, C, K]`` of a bucket; None where causal attention of SDPA says the same."""
        bucket = self.buckets[index]
        if window is not None and window >= bucket.keys:
            window = None
        if bucket.prefix is None and window is None:
            return None
        key = (index, window, dtype)
        if key not in self._masks:
            device = bucket.query_rows.device
            prefix = bucket.prefix if bucket.prefix is not None else torch.zeros(1, dtype=torch.int64, device=device)
            # Position of a query among the keys of its segment; every key up to it is a real one.
            at = prefix[:, None, None] + torch.arange(bucket.queries, device=device)[None, :, None]
            keys = torch.arange(bucket.keys, device=device)[None, None, :]
            visible = keys <= at
            if window is not None:
                visible = visible & (keys > at - window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=device)
            self._masks[key] = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        return self._masks[key]


def make_plan(lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> AttentionPlan:
    """Plan the attention of segments that lie one after another in the packed input.

    Args:
        lengths: rows of each segment; at least 1.
        prefixes: (first row, length) of the rows each segment attends to before itself; length 0 for none.
    """
    count = np.asarray(lengths, dtype=np.int64)
    prefix_start = np.asarray([start for start, _ in prefixes], dtype=np.int64)
    prefix_len = np.asarray([length for _, length in prefixes], dtype=np.int64)
    start = np.cumsum(count) - count
    out_rows: Ints = np.empty(int(count.sum()), dtype=np.int64)
    buckets: list[Bucket] = []
    offset = 0
    for members in _assign_buckets(count, prefix_len):
        bucket, flat = _make_bucket(start[members], count[members], prefix_start[members], prefix_len[members])
        rows, positions = flat
        out_rows[rows] = offset + positions
        offset += bucket.n * bucket.queries
        buckets.append(bucket)
    keys = count + prefix_len
    return AttentionPlan(
        buckets=buckets,
        out_rows=torch.from_numpy(out_rows),
        cu_queries=torch.from_numpy(np.concatenate([[0], np.cumsum(count)]).astype(np.int32)),
        cu_keys=torch.from_numpy(np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)),
        varlen_keys=_varlen_keys(start, count, prefix_start, prefix_len) if prefix_len.any() else None,
        max_queries=int(count.max()),
        max_keys=int(keys.max()),
    )


def _assign_buckets(count: Ints, prefix_len: Ints) -> list[Ints]:
    """Segments of each bucket; those with and without a prefix never share one, as only the latter need no mask."""
    buckets: list[Ints] = []
    for chosen in (np.flatnonzero(prefix_len == 0), np.flatnonzero(prefix_len > 0)):
        if len(chosen) == 0:
            continue
        queries, keys = count[chosen], count[chosen] + prefix_len[chosen]
        options = [_split_sorted(np.lexsort((keys, queries)), queries, keys)]
        if prefix_len[chosen].any():
            options.append(_split_sorted(np.lexsort((queries, keys)), queries, keys))
        _, groups = min(options, key=lambda option: option[0])
        buckets.extend(chosen[group] for group in groups)
    return buckets


def _split_sorted(order: Ints, queries: Ints, keys: Ints) -> tuple[float, list[Ints]]:
    """Cut the ordered segments where the summed cost of the buckets is least (dynamic programme over cut points)."""
    queries, keys = queries[order], keys[order]
    changes: Ints = np.flatnonzero((np.diff(queries) != 0) | (np.diff(keys) != 0)) + 1
    cuts = np.concatenate([[0], _thin(changes, queries, keys), [len(order)]])
    pieces = len(cuts) - 1
    piece_queries = np.maximum.reduceat(queries, cuts[:-1])
    piece_keys = np.maximum.reduceat(keys, cuts[:-1])
    best = np.zeros(pieces + 1)
    back: Ints = np.zeros(pieces + 1, dtype=np.int64)
    for end in range(1, pieces + 1):
        # Running maxima over pieces start..end-1, for every start.
        most_queries = np.maximum.accumulate(piece_queries[:end][::-1])[::-1]
        most_keys = np.maximum.accumulate(piece_keys[:end][::-1])[::-1]
        n = cuts[end] - cuts[:end]
        rows = n * (most_queries + most_keys + most_queries * most_keys / _SCORES_PER_ROW)
        total = best[:end] + _CALL_COST_ROWS + rows
        back[end] = int(total.argmin())
        best[end] = total[back[end]]
    groups: list[Ints] = []
    end = pieces
    while end > 0:
        groups.append(order[cuts[back[end]] : cuts[end]])
        end = int(back[end])
    return float(best[pieces]), groups


def _thin(cuts: Ints, queries: Ints, keys: Ints) -> Ints:
    """Cut points at which a length has changed by some percent since the one before; bounds the dynamic programme."""
    if len(cuts) <= _MAX_CANDIDATES:
        return cuts
    kept: list[int] = []
    last = np.array([queries[0], keys[0]])
    sizes = np.stack([queries, keys], 1)
    for cut in cuts:
        if (np.abs(sizes[cut] - last) > _SAME_LENGTH * last).any():
            kept.append(cut)
            last = sizes[cut]
    if len(kept) > 4 * _MAX_CANDIDATES:
        kept = [kept[i] for i in np.linspace(0, len(kept) - 1, 4 * _MAX_CANDIDATES).astype(np.int64)]
    return np.asarray(kept, dtype=np.int64)


def _make_bucket(start: Ints, count: Ints, prefix_start: Ints, prefix_len: Ints) -> tuple[Bucket, tuple[Ints, Ints]]:
    """The bucket, and (row, position in the bucket's flat output) of every real query."""
    n, most = len(count), int(count.max())
    steps = np.arange(most)
    real = steps[None, :] < count[:, None]
    query_rows = start[:, None] + np.minimum(steps[None, :], count[:, None] - 1)
    flat = query_rows[real], np.flatnonzero(real.ravel())
    key_rows, keys, prefix = None, most, None
    if prefix_len.any():
        keys = int((count + prefix_len).max())
        at = np.arange(keys)[None, :]
        own = start[:, None] + np.minimum(at - prefix_len[:, None], count[:, None] - 1)
        key_rows = np.where(at < prefix_len[:, None], prefix_start[:, None] + at, own)
        prefix = torch.from_numpy(prefix_len)
    return (
        Bucket(
            n=n,
            queries=most,
            keys=keys,
            query_rows=torch.from_numpy(query_rows.ravel()),
            key_rows=None if key_rows is None else torch.from_numpy(key_rows.ravel()),
            prefix=prefix,
        ),
        flat,
    )


def _varlen_keys(start: Ints, count: Ints, prefix_start: Ints, prefix_len: Ints) -> torch.Tensor:
    pieces = [
        np.concatenate([np.arange(ps, ps + pl), np.arange(s, s + c)])
        for s, c, ps, pl in zip(start, count, prefix_start, prefix_len, strict=True)
    ]
    return torch.from_numpy(np.concatenate(pieces))


class _TakeRows(torch.autograd.Function):
    """``x[rows]`` for ``x [N, W]``; rows may repeat. Faster than indexing: its backward adds whole rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grads[0].contiguous(), rows, ctx.num_rows, -1, False), None


class _PermuteRows(torch.autograd.Function):
    """``x[rows]`` where no row repeats."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.num_rows, *grads[0].shape[1:])
        return out.index_copy_(0, rows, grads[0]), None


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]`` along the first dimension, with a fast backward on a CPU."""
    return _TakeRows.apply(x, rows)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Batched attention: ``query [n, H, C, D]``, ``key`` and ``value [n, H_kv, K, D]``; causal where no mask."""
    repeats = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=repeats > 1,
        )
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights[..., : key.shape[-2]], dropout, module.training)
    return weights @ value


@functools.cache
def _has_flash_attn() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    areal_plan: AttentionPlan | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' ``AttentionInterface``.

    Args:
        query: ``[1, H, N, D]``; ``key`` and ``value`` ``[1, H_kv, N, D]``: local rows and heads on a mesh.
        areal_plan: travels through the model's keyword arguments, so that recomputation under gradient checkpointing
            sees it too.

    Returns:
        ``[1, N, H, D_v]`` and None.
    """
    if areal_plan is None:
        raise RuntimeError(
            f"{type(module).__name__} got no attention plan: this model does not hand keyword arguments down to its "
            "attention layers. Set attn_impl=sdpa to run it on padded batches."
        )
    if kwargs.get("position_bias") is not None or not getattr(module, "is_causal", True):
        raise RuntimeError(
            f"{type(module).__name__} is not causal attention without a bias. Set attn_impl=sdpa for padded batches."
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    window = sliding_window if sliding_window is not None else _window_of(module)
    ulysses = areal_plan.ulysses
    if ulysses is None:
        return _packed_attention(module, q, k, v, areal_plan, scaling, dropout, window, softcap, s_aux)[None], None
    q, k, v = ulysses.rows_to_heads(q, k, v)
    sinks = None if s_aux is None else ulysses.own_heads(s_aux)
    out = _packed_attention(module, q, k, v, areal_plan, scaling, dropout, window, softcap, sinks)
    return ulysses.heads_to_rows(out)[None], None


def _packed_attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``q [N, H, D]``, ``k`` and ``v`` ``[N, H_kv, D]`` to ``[N, H, D_v]``."""
    if _has_flash_attn() and q.is_cuda and q.dtype != torch.float32 and sinks is None:
        return _flash_varlen(q, k, v, plan, scaling, dropout, window, softcap)
    q_flat, k_flat, v_flat = (x.reshape(len(x), -1) for x in (q, k, v))
    outputs = []
    for index, bucket in enumerate(plan.buckets):
        key_rows = bucket.query_rows if bucket.key_rows is None else bucket.key_rows
        qb = take_rows(q_flat, bucket.query_rows).view(bucket.n, bucket.queries, *q.shape[1:]).transpose(1, 2)
        kb = take_rows(k_flat, key_rows).view(bucket.n, bucket.keys, *k.shape[1:]).transpose(1, 2)
        vb = take_rows(v_flat, key_rows).view(bucket.n, bucket.keys, *v.shape[1:]).transpose(1, 2)
        mask = plan.mask(index, window, q.dtype)
        out = _attend(module, qb, kb, vb, mask, scaling, dropout, softcap, sinks)
        outputs.append(out.transpose(1, 2).reshape(bucket.n * bucket.queries, -1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _PermuteRows.apply(flat, plan.out_rows).view(len(q), q.shape[1], -1)


def _window_of(module: nn.Module) -> int | None:
    """The window of a sliding layer that does not pass it to the attention function (its mask would have had it)."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None or layer is None or types[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    if plan.varlen_keys is not None:
        k, v = k[plan.varlen_keys], v[plan.varlen_keys]
    # flash-attn aligns the causal mask with the last key, which is what a prefix needs.
    out: torch.Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=plan.cu_queries,
        cu_seqlens_k=plan.cu_keys,
        max_seqlen_q=plan.max_queries,
        max_seqlen_k=plan.max_keys,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
        window_size=(window - 1, 0) if window is not None else (-1, -1),
        softcap=softcap or 0.0,
    )
    return out


def register_attention() -> str:
    """Make ``varlen_attention`` known to transformers; returns its name.

    No mask function is registered with it: transformers then builds no mask for this implementation at all.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
    return ATTENTION_NAME
