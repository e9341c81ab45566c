"""Micro-batches under a token budget, and balanced parts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.data.microbatch import split_by_tokens
from areal_core.data.partition import GROUP_TOLERANCE, balanced_partition, minibatches

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


def loads(parts: list[list[int]], lengths: list[Any]) -> list[Any]:
    return [sum(lengths[i] for i in part) for part in parts]


def plain_first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for chosen in bins:
            if sum(lengths[i] for i in chosen) + lengths[index] <= budget:
                chosen.append(index)
                break
        else:
            bins.append([index])
    return [sorted(chosen) for chosen in bins]


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 60))
def test_split_when_ungrouped_expected_first_fit_decreasing(lengths: list[int], budget: int) -> None:
    parts = split_by_tokens(lengths, budget)

    # Where a sequence exceeds the budget, the textbook's bins hold more than one of length 0 beside it; compare sizes.
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(
        load <= budget or sum(lengths[i] > 0 for i in part) == 1
        for part, load in zip(parts, loads(parts, lengths), strict=True)
    )
    if max(lengths, default=0) <= budget:
        assert parts == plain_first_fit_decreasing(lengths, budget)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=30),
    budget=st.integers(20, 80),
    group_size=st.integers(1, 5),
)
def test_split_when_grouped_expected_groups_whole_where_they_fit(
    lengths: list[int], budget: int, group_size: int
) -> None:
    groups = [i // group_size for i in range(len(lengths))]

    parts = split_by_tokens(lengths, budget, groups)

    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(load <= budget for load in loads(parts, lengths))
    place = {index: number for number, part in enumerate(parts) for index in part}
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        if sum(lengths[i] for i in members) <= budget:
            assert len({place[i] for i in members}) == 1


def test_split_when_no_budget_or_nothing_to_split() -> None:
    assert split_by_tokens([3, 5, 1], None) == [[0, 1, 2]]
    assert split_by_tokens([], None) == []
    assert split_by_tokens([], 8) == []
    assert split_by_tokens([], 8, []) == []


def test_split_when_sequence_exceeds_budget_expected_alone() -> None:
    assert split_by_tokens([3, 50, 4], 10) == [[1], [0, 2]]
    assert split_by_tokens([3, 50, 4], 10, [0, 0, 0]) == [[1], [0, 2]]


@pytest.mark.parametrize(("budget", "groups"), [(0, None), (-1, None), (4, [0])])
def test_split_when_arguments_are_wrong_expected_error(budget: int, groups: list[int] | None) -> None:
    with pytest.raises(ValueError, match=r"must be >= 1|groups has 1 entries"):
        split_by_tokens([1, 2], budget, groups)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, k=st.integers(1, 12), group_size=st.none() | st.integers(1, 6))
def test_partition_expected_every_index_once_and_balanced(lengths: list[int], k: int, group_size: int | None) -> None:
    groups = None if group_size is None else [i // group_size for i in range(len(lengths))]

    parts = balanced_partition(lengths, k, groups)

    assert len(parts) == k
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    # List scheduling ends at most one item above the mean; whole groups are accepted up to the tolerance.
    mean, longest = sum(lengths) / k, max(lengths, default=0)
    assert max(loads(parts, lengths)) <= max(mean + longest, (1 + GROUP_TOLERANCE) * max(mean, longest)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), k=st.integers(1, 3))
def test_partition_when_small_expected_within_four_thirds_of_the_optimum(lengths: list[int], k: int) -> None:
    best = min(
        max(sum(n for n, part in zip(lengths, places, strict=True) if part == p) for p in range(k))
        for places in itertools.product(range(k), repeat=len(lengths))
    )

    assert max(loads(balanced_partition(lengths, k), lengths)) <= 4 / 3 * best + 1e-9


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, k=st.integers(1, 6), group_size=st.none() | st.integers(1, 4))
def test_partition_when_attention_counts_expected_balanced_cost(
    lengths: list[int], k: int, group_size: int | None
) -> None:
    groups = None if group_size is None else [i // group_size for i in range(len(lengths))]
    costs = [n + 0.01 * n * n for n in lengths]

    parts = balanced_partition(lengths, k, groups, attention_cost=0.01)

    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    mean, longest = sum(costs) / k, max(costs, default=0)
    assert max(loads(parts, costs)) <= max(mean + longest, (1 + GROUP_TOLERANCE) * max(mean, longest)) * (1 + 1e-9)


def test_partition_when_one_sequence_is_long_expected_attention_cost_gives_its_rank_fewer_tokens() -> None:
    lengths = [8000, *[500] * 32]  # 24000 tokens

    by_tokens = balanced_partition(lengths, 2)
    by_cost = balanced_partition(lengths, 2, attention_cost=1 / (12 * 1024))

    costs = [n + n * n / (12 * 1024) for n in lengths]
    assert loads(by_tokens, lengths) == [12000, 12000]
    assert max(loads(by_cost, costs)) < 0.9 * max(loads(by_tokens, costs))


def test_partition_when_groups_balance_expected_groups_whole() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 400, 256).tolist()
    groups = [i // 8 for i in range(256)]

    parts = balanced_partition(lengths, 4, groups)

    place = {index: number for number, part in enumerate(parts) for index in part}
    assert all(len({place[i] for i in range(8 * g, 8 * g + 8)}) == 1 for g in range(32))
    assert max(loads(parts, lengths)) <= 1.1 * sum(lengths) / 4


def test_partition_when_one_sequence_exceeds_the_mean_expected_the_other_groups_whole() -> None:
    # Arrange: no partition can be better than the longest sequence, so there is nothing to gain from cutting a group.
    lengths, groups = [100, *[10] * 8], [0, 1, 1, 2, 2, 3, 3, 4, 4]

    # Act
    parts = balanced_partition(lengths, 3, groups)

    # Assert
    assert sorted(loads(parts, lengths)) == [40, 40, 100]
    place = {index: number for number, part in enumerate(parts) for index in part}
    assert all(place[i] == place[i + 1] for i in (1, 3, 5, 7))


def test_partition_when_halves_of_groups_balance_expected_no_finer_cut() -> None:
    # Arrange: two groups of eight over four parts.
    groups = [0] * 8 + [1] * 8

    # Act
    parts = balanced_partition([10] * 16, 4, groups)

    # Assert: a part shares one prompt.
    assert [len(part) for part in parts] == [4] * 4
    assert all(len({groups[i] for i in part}) == 1 for part in parts)


def test_partition_when_one_group_expected_split() -> None:
    parts = balanced_partition([10] * 8, 4, [7] * 8)

    assert loads(parts, [10] * 8) == [20] * 4


def test_partition_when_more_parts_than_sequences_expected_empty_parts() -> None:
    parts = balanced_partition([5, 5], 4)

    assert sorted(map(len, parts)) == [0, 0, 1, 1]
    assert [len(part) for part in balanced_partition([0] * 6, 3)] == [2, 2, 2]
    assert balanced_partition([], 3) == [[], [], []]
    assert balanced_partition([], 3, []) == [[], [], []]


def test_partition_when_arguments_are_wrong_expected_error() -> None:
    with pytest.raises(ValueError, match="number of parts must be >= 1, got 0"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match="groups has 2 entries"):
        balanced_partition([1], 2, [0, 1])


def test_minibatches_when_grouped_expected_disjoint_and_whole() -> None:
    lengths = [7, 9, 8, 8, 3, 4, 5, 4]

    parts = minibatches(lengths, 2, [0, 0, 1, 1, 2, 2, 3, 3])

    assert sorted(itertools.chain(*parts)) == list(range(8))
    assert all(len(part) == 4 for part in parts)
    place = {index: number for number, part in enumerate(parts) for index in part}
    assert all(place[i] == place[i + 1] for i in (0, 2, 4, 6))
    assert minibatches(lengths, 1) == [list(range(8))]
