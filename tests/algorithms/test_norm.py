"""Normalisation against its formula, for every combination of levels, on ragged groups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.norm import has_variance, normalize

LEVELS = [None, "group", "batch"]


def reference(
    values: list[float],
    groups: list[int],
    mask: list[bool],
    mean_level: str | None,
    std_level: str | None,
    leave1out: bool,
    unbiased: bool,
    eps: float,
) -> list[float]:
    def peers(i: int, level: str) -> list[int]:
        return [j for j in range(len(values)) if mask[j] and (level == "batch" or groups[j] == groups[i])]

    def constant(i: int, level: str) -> bool:
        return len({values[j] for j in peers(i, level)}) == 1

    result = []
    for i, x in enumerate(values):
        if not mask[i]:
            result.append(0.0)
            continue
        y = x
        if mean_level is not None:
            others = [j for j in peers(i, mean_level) if not leave1out or j != i]
            y = 0.0 if constant(i, mean_level) else x - math.fsum(values[j] for j in others) / len(others)
        if std_level is not None:
            chosen = [values[j] for j in peers(i, std_level)]
            centre = math.fsum(chosen) / len(chosen)
            squares = math.fsum((v - centre) ** 2 for v in chosen)
            if constant(i, std_level):
                y = 0.0
            else:
                y /= math.sqrt(squares / (len(chosen) - (1 if unbiased else 0))) + eps
        result.append(y)
    return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("mean_level", "std_level", "leave1out", "unbiased"),
    list(itertools.product(LEVELS, LEVELS, [False, True], [False, True])),
)
def test_normalize_when_ragged_expected_formula(
    mean_level: str | None, std_level: str | None, leave1out: bool, unbiased: bool, masked: bool
) -> None:
    g = torch.Generator().manual_seed(7)
    # Groups of 1, 2, 3 and 6, interleaved; one of them without variance.
    groups = torch.tensor([4, 9, 4, -1, 9, 4, 9, 9, 30, 9, 9, 17, 17])
    values = torch.randn(len(groups), generator=g, dtype=torch.float64)
    values[groups == 17] = 0.1
    mask = torch.rand(len(groups), generator=g) > 0.3 if masked else torch.ones(len(groups), dtype=torch.bool)

    result = normalize(
        values,
        groups,
        mask if masked else None,
        mean_level=mean_level,
        std_level=std_level,
        mean_leave1out=leave1out,
        std_unbiased=unbiased,
        eps=1e-3,
    )

    expected = reference(
        values.tolist(), groups.tolist(), mask.tolist(), mean_level, std_level, leave1out, unbiased, 1e-3
    )
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mean_level", "std_level"), [(m, s) for m in LEVELS for s in LEVELS if m or s])
@pytest.mark.parametrize("leave1out", [False, True])
def test_normalize_when_nothing_varies_expected_exactly_zero(
    mean_level: str | None, std_level: str | None, leave1out: bool
) -> None:
    # 0.1 and 1/3 are not exact in binary: their mean differs from them in the last bit.
    values = torch.full((7,), 0.1)
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])

    result = normalize(values, groups, mean_level=mean_level, std_level=std_level, mean_leave1out=leave1out)

    assert result.tolist() == [0.0] * 7


def test_normalize_when_grpo_expected_zero_for_groups_of_one_and_groups_without_variance() -> None:
    values = torch.tensor([0.7, 0.1, 0.1, 0.1, 1.0, 0.0])
    groups = torch.tensor([8, 3, 3, 3, 5, 5])

    result = normalize(values, groups, mean_level="group", std_level="group", eps=0.0)

    assert result[:4].tolist() == [0.0] * 4
    torch.testing.assert_close(result[4:], torch.tensor([2**-0.5, -(2**-0.5)]), rtol=1e-6, atol=0)


def test_normalize_when_rloo_expected_mean_of_the_others_subtracted() -> None:
    result = normalize(
        torch.tensor([1.0, 4.0, 10.0, 3.0]),
        torch.tensor([0, 0, 0, 1]),
        mean_level="group",
        std_level=None,
        mean_leave1out=True,
    )

    assert result.tolist() == [1.0 - 7.0, 4.0 - 5.5, 10.0 - 2.5, 0.0]


def test_normalize_when_empty_expected_empty() -> None:
    empty = torch.zeros(0)

    result = normalize(empty, torch.zeros(0, dtype=torch.int64), mean_level="group", std_level="batch")

    assert result.shape == (0,)


def test_normalize_when_everything_is_masked_expected_zeros() -> None:
    result = normalize(
        torch.randn(3), torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.bool), mean_level="batch", std_level="group"
    )

    assert result.tolist() == [0.0] * 3


def test_normalize_when_groups_are_missing_expected_error() -> None:
    with pytest.raises(ValueError, match="needs group_ids"):
        normalize(torch.zeros(2), mean_level="group", std_level=None)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 20))
def test_normalize_when_order_changes_expected_same_values(data: st.DataObject, size: int) -> None:
    values = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, -2.5]), min_size=size, max_size=size)))
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    levels = {
        "mean_level": data.draw(st.sampled_from(LEVELS)),
        "std_level": data.draw(st.sampled_from(LEVELS)),
        "mean_leave1out": data.draw(st.booleans()),
    }

    straight = normalize(values, groups, **levels)
    permuted = normalize(values[order], groups[order], **levels)

    torch.testing.assert_close(permuted, straight[order], rtol=1e-6, atol=1e-7)


def test_has_variance_expected_per_group() -> None:
    result = has_variance(torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5]), torch.tensor([2, 2, 0, 7, 7]))

    assert result.tolist() == [True, True, False, False, False]
