"""Micro-batches: sequences grouped under a token budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def split_by_tokens(
    lengths: Sequence[int],
    max_tokens: int | None,
    groups: Sequence[Hashable] | None = None,
    *,
    whole_groups: bool = False,
) -> list[list[int]]:
    """Split sequences into micro-batches of at most ``max_tokens`` tokens, by first-fit decreasing.

    First-fit decreasing needs at most 11/9 of the fewest possible bins (Johnson 1973). The result depends on the
    arguments alone, so every rank that sees the same lengths makes the same split.

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of one micro-batch. A longer sequence stands alone. None: everything in one micro-batch.
        groups: group of each sequence. The sequences of a group stay in one micro-batch where the group fits, so that
            an engine can share their prompt; a larger group is split into as few pieces as first-fit finds.
        whole_groups: no group is split; one that is larger than the budget stands alone, as a long sequence does.

    Returns:
        Lists of indices into ``lengths``, each in ascending order; together they hold every index once. No sequences
        give no micro-batches.

    Raises:
        ValueError: if ``max_tokens`` is below 1 or ``groups`` has another length than ``lengths``.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    if groups is not None and len(groups) != len(lengths):
        raise ValueError(f"groups has {len(groups)} entries, but lengths has {len(lengths)}")
    if not lengths:
        return []
    if max_tokens is None:
        return [list(range(len(lengths)))]
    if groups is None:
        units = [[i] for i in range(len(lengths))]
    elif whole_groups:
        units = group_members(groups)
    else:
        units = [piece for members in group_members(groups) for piece in _pack(members, lengths, max_tokens)]
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    bins = _first_fit_decreasing(sizes, max_tokens)
    return [sorted(i for u in chosen for i in units[u]) for chosen in bins]


def group_members(groups: Sequence[Hashable]) -> list[list[int]]:
    """The indices of each group, groups in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _pack(members: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """One piece if the group fits, else its own first-fit pieces."""
    sizes = [lengths[i] for i in members]
    if sum(sizes) <= max_tokens:
        return [members]
    return [[members[j] for j in chosen] for chosen in _first_fit_decreasing(sizes, max_tokens)]


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices. A tournament tree over the free space finds the first bin that fits in logarithmic time."""
    leaves = 1
    while leaves < len(sizes):
        leaves *= 2
    # Every bin starts out open and empty; an item above the capacity takes the first empty bin and closes it.
    free = [capacity] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        need = min(sizes[index], capacity)
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < need:
                node += 1
        bins[node - leaves].append(index)
        free[node] -= need
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return [chosen for chosen in bins if chosen]
