"""Sums and scans over the sequences (or groups) of a packed batch, without padding and without host synchronisation."""

from __future__ import annotations

import torch


def sequence_index(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The sequence that each token belongs to.

    Args:
        cu_seqlens: int ``[B + 1]``.
        num_tokens: ``T``.

    Returns:
        int64 ``[T]``.
    """
    token_at = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token_at, right=True)


def segment_sum(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Sum of ``values`` ``[N]`` per segment ``index`` int64 ``[N]``; ``[size]``."""
    return values.new_zeros(size).index_add(0, index, values)


def expand_rows(rows: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Repeat a value per sequence ``[B]`` over the sequence's tokens: ``[T]``."""
    return rows.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def dense_groups(group_ids: torch.Tensor) -> torch.Tensor:
    """Renumber arbitrary ids int64 ``[N]`` to ``0 .. G - 1`` (``G <= N``) in ascending order of id; int64 ``[N]``."""
    ordered, order = group_ids.sort(stable=True)
    is_new = torch.zeros_like(ordered)
    is_new[1:] = (ordered[1:] != ordered[:-1]).to(is_new.dtype)
    return torch.empty_like(ordered).scatter(0, order, is_new.cumsum(0))


def last_masked(mask: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """For each token, the position of the last masked token at or before it in the same sequence.

    Args:
        mask: bool ``[T]``.
        index: int64 ``[T]``, the token's sequence (ascending).

    Returns:
        int64 ``[T]``; -1 where there is none.
    """
    token_at = torch.arange(len(mask), device=mask.device)
    last = torch.where(mask, token_at, -1)
    if len(mask):
        last = last.cummax(0).values
    return torch.where((last >= 0) & (index[last] == index), last, -1) if len(mask) else last


def next_masked(mask: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """As ``last_masked``, but the next masked token strictly after each token; -1 where there is none."""
    length = len(mask)
    if not length:
        return torch.zeros_like(index)
    token_at = torch.arange(length, device=mask.device)
    at_or_after = torch.where(mask, token_at, length).flip(0).cummin(0).values.flip(0)
    after = torch.cat([at_or_after[1:], at_or_after.new_full((1,), length)])
    same = index[after.clamp(max=length - 1)] == index
    return torch.where((after < length) & same, after, -1)


def reverse_scan(values: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """``y[t] = values[t] + decay[t] * y[t + 1]``, with ``y[T] = 0``.

    An associative scan by doubling (Hillis and Steele 1986): log2(T) vector operations instead of T steps. Set
    ``decay`` to 0 at the last token of a sequence and nothing flows from one sequence into the one before it.

    Args:
        values, decay: ``[T]``.

    Returns:
        ``[T]``.
    """
    total, factor = values.clone(), decay.clone()
    step = 1
    while step < len(values):
        total = torch.cat([total[:-step] + factor[:-step] * total[step:], total[-step:]])
        # Beyond the end there is nothing to add, so what the factor is there does not matter.
        factor = torch.cat([factor[:-step] * factor[step:], factor[-step:]])
        step *= 2
    return total
