"""Balanced parts: shards of a batch for the ranks, and mini-batches for several updates."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from areal_core.data.microbatch import group_members

#: A group is split over several parts only if the longest part would otherwise exceed the mean by more than this.
GROUP_TOLERANCE = 0.1


def balanced_partition(
    lengths: Sequence[int],
    k: int,
    groups: Sequence[Hashable] | None = None,
    *,
    tolerance: float = GROUP_TOLERANCE,
    attention_cost: float = 0.0,
) -> list[list[int]]:
    """Split sequences over ``k`` parts with about equal cost, longest processing time first.

    The cost of a sequence of ``n`` tokens is ``n + attention_cost * n ** 2``. A transformer of width ``H`` spends about
    ``24 H^2`` operations on a token in each layer's matrices and ``2 H n`` on its causal attention, so ``1 / (12 H)``
    counts the work; 0 counts tokens.

    LPT is within 4/3 of the best possible largest part (Graham 1969), and far closer with many sequences.

    Args:
        lengths: tokens of each sequence.
        k: number of parts. With fewer sequences than parts some parts are empty.
        groups: group of each sequence. Groups stay whole while the largest part is at most ``1 + tolerance`` times
            the larger of the mean part and the longest sequence; else every group is cut into 2, 4, 8, ... balanced
            pieces until that holds or sequences stand alone.
        attention_cost: weight of the square of a length; at least 0.

    Returns:
        ``k`` lists of indices, each in ascending order; together they hold every index once. Deterministic.

    Raises:
        ValueError: if ``k`` is below 1, ``attention_cost`` below 0, or ``groups`` has another length than ``lengths``.
    """
    if k < 1:
        raise ValueError(f"the number of parts must be >= 1, got {k}")
    if groups is not None and len(groups) != len(lengths):
        raise ValueError(f"groups has {len(groups)} entries, but lengths has {len(lengths)}")
    if attention_cost < 0:
        raise ValueError(f"attention_cost must be >= 0, got {attention_cost}")
    if k == 1:
        return [list(range(len(lengths)))]
    singles = [[i] for i in range(len(lengths))]
    costs = [n + attention_cost * n * n for n in lengths] if attention_cost else lengths
    if groups is None or not lengths:
        return _partition_units(singles, costs, k)

    members = group_members(groups)
    largest_group = max(len(group) for group in members)
    bound = (1 + tolerance) * max(sum(costs) / k, max(costs))
    pieces = 1
    while pieces < largest_group:
        units = [unit for group in members for unit in _cut(group, costs, pieces)]
        parts = _partition_units(units, costs, k)
        if max(sum(costs[i] for i in part) for part in parts) <= bound:
            return parts
        pieces *= 2
    return _partition_units(singles, costs, k)


def minibatches(lengths: Sequence[int], n: int, groups: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Split a batch into ``n`` mini-batches of about equal token counts, one optimizer step each.

    Arguments and result as in ``balanced_partition``: groups stay whole where that keeps the balance, every index
    appears once, and with fewer sequences than ``n`` some mini-batches are empty.
    """
    return balanced_partition(lengths, n, groups)


def _cut(group: list[int], costs: Sequence[float], pieces: int) -> list[list[int]]:
    if pieces == 1 or len(group) == 1:
        return [group]
    parts = _lpt([costs[i] for i in group], pieces)
    return [[group[j] for j in part] for part in parts if part]


def _partition_units(units: list[list[int]], costs: Sequence[float], k: int) -> list[list[int]]:
    parts = _lpt([sum(costs[i] for i in unit) for unit in units], k)
    return [sorted(i for u in part for i in units[u]) for part in parts]


def _lpt(sizes: Sequence[float], k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    # The count breaks ties so that sequences of length 0 spread too; the part number makes it deterministic.
    heap: list[tuple[float, int, int]] = [(0, 0, part) for part in range(k)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (load + sizes[index], count + 1, part))
    return parts
