"""Balanced parts: shards of a batch for the ranks, and mini-batches for several updates."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from areal_core.data.microbatch import group_members

#: A group is split over several parts only if the longest part would otherwise exceed the mean by more than this.
GROUP_TOLERANCE = 0.1


def balanced_partition(
    lengths: Sequence[int], k: int, groups: Sequence[Hashable] | None = None, *, tolerance: float = GROUP_TOLERANCE
) -> list[list[int]]:
    """Split sequences over ``k`` parts with about equal token sums, longest processing time first.

    LPT is within 4/3 of the best possible largest part (Graham 1969), and far closer with many sequences.

    Args:
        lengths: tokens of each sequence.
        k: number of parts. With fewer sequences than parts some parts are empty.
        groups: group of each sequence. Groups stay whole while the largest part is at most ``1 + tolerance`` times
            the larger of the mean part and the longest sequence; else every group is cut into 2, 4, 8, ... balanced
            pieces until that holds or sequences stand alone.

    Returns:
        ``k`` lists of indices, each in ascending order; together they hold every index once. Deterministic.

    Raises:
        ValueError: if ``k`` is below 1 or ``groups`` has another length than ``lengths``.
    """
    if k < 1:
        raise ValueError(f"the number of parts must be >= 1, got {k}")
    if groups is not None and len(groups) != len(lengths):
        raise ValueError(f"groups has {len(groups)} entries, but lengths has {len(lengths)}")
    if k == 1:
        return [list(range(len(lengths)))]
    singles = [[i] for i in range(len(lengths))]
    if groups is None or not lengths:
        return _partition_units(singles, lengths, k)

    members = group_members(groups)
    largest_group = max(len(group) for group in members)
    bound = (1 + tolerance) * max(sum(lengths) / k, max(lengths))
    pieces = 1
    while pieces < largest_group:
        units = [unit for group in members for unit in _cut(group, lengths, pieces)]
        parts = _partition_units(units, lengths, k)
        if max(sum(lengths[i] for i in part) for part in parts) <= bound:
            return parts
        pieces *= 2
    return _partition_units(singles, lengths, k)


def minibatches(lengths: Sequence[int], n: int, groups: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Split a batch into ``n`` mini-batches of about equal token counts, one optimizer step each.

    Arguments and result as in ``balanced_partition``: groups stay whole where that keeps the balance, every index
    appears once, and with fewer sequences than ``n`` some mini-batches are empty.
    """
    return balanced_partition(lengths, n, groups)


def _cut(group: list[int], lengths: Sequence[int], pieces: int) -> list[list[int]]:
    if pieces == 1 or len(group) == 1:
        return [group]
    parts = _lpt([lengths[i] for i in group], pieces)
    return [[group[j] for j in part] for part in parts if part]


def _partition_units(units: list[list[int]], lengths: Sequence[int], k: int) -> list[list[int]]:
    parts = _lpt([sum(lengths[i] for i in unit) for unit in units], k)
    return [sorted(i for u in part for i in units[u]) for part in parts]


def _lpt(sizes: Sequence[int], k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    # The count breaks ties so that sequences of length 0 spread too; the part number makes it deterministic.
    heap = [(0, 0, part) for part in range(k)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (load + sizes[index], count + 1, part))
    return parts
