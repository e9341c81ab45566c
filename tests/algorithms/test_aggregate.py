"""Loss aggregation: each mode against its definition, and independent of any split."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.aggregate import sequence_weights, token_weights, trained_lengths
from areal_core.api.batch import PackedBatch

BatchOf = Callable[..., PackedBatch]
MODES = ["token_mean", "seq_mean", "seq_sum_const"]


def total(batch: PackedBatch, mode: str) -> tuple[float, float]:
    """Numerator and denominator of a batch's loss, with ``returns`` as the loss per token."""
    weights = token_weights(batch["loss_mask"], batch.cu_seqlens, mode, 7.0).double()
    rows = sequence_weights(batch["loss_mask"], batch.cu_seqlens, mode)
    return float((weights * batch["returns"]).sum()), float(rows.sum())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_aggregation_when_ragged_expected_definition(batch_of: BatchOf, mode: str, seed: int) -> None:
    batch = batch_of(seed)

    numerator, denominator = total(batch, mode)

    sequences = [
        [x for x, trained in zip(loss.tolist(), mask.tolist(), strict=True) if trained]
        for loss, mask in zip(batch.sequences("returns"), batch.sequences("loss_mask"), strict=True)
    ]
    sequences = [s for s in sequences if s]
    expected = {
        "token_mean": sum(map(sum, sequences)) / sum(map(len, sequences)),
        "seq_mean": sum(sum(s) / len(s) for s in sequences) / len(sequences),
        "seq_sum_const": sum(sum(s) / 7.0 for s in sequences) / len(sequences),
    }[mode]
    assert math.isclose(numerator / denominator, expected, rel_tol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), owners=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_aggregation_when_split_over_ranks_expected_the_same_sums(mode: str, seed: int, owners: list[int]) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (9,), generator=g)
    tokens = int(lengths.sum())
    batch = PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.arange(tokens),
            "loss_mask": torch.rand(tokens, generator=g) > 0.5,
            "returns": torch.randn(tokens, generator=g).double(),
        },
    )
    parts = [[i for i in range(9) if owners[i] == rank] for rank in range(4)]

    whole = total(batch, mode)
    pieces = [total(batch.select(part), mode) for part in parts]

    assert math.isclose(sum(n for n, _ in pieces), whole[0], rel_tol=1e-6, abs_tol=1e-9)
    assert sum(d for _, d in pieces) == whole[1]


@pytest.mark.parametrize("mode", MODES)
def test_weights_when_nothing_is_trained_expected_zero(mode: str) -> None:
    mask, cu_seqlens = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 2, 3], dtype=torch.int32)

    assert token_weights(mask, cu_seqlens, mode, 4.0).tolist() == [0.0, 0.0, 0.0]
    assert sequence_weights(mask, cu_seqlens, mode).tolist() == [0.0, 0.0]
    assert trained_lengths(mask, cu_seqlens).tolist() == [0, 0]


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_seq_sum_const_when_constant_is_missing_expected_error(constant: float | None) -> None:
    mask, cu_seqlens = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1], dtype=torch.int32)

    with pytest.raises(ValueError, match="needs a positive constant"):
        token_weights(mask, cu_seqlens, "seq_sum_const", constant)


def test_token_weights_when_mode_is_unknown_expected_error() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        token_weights(torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]), "mean")
