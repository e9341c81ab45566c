"""Bradley-Terry and DPO losses against their formulas, pair by pair in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from areal_core.algorithms.bradley_terry import bradley_terry_loss, pair_weight
from areal_core.algorithms.dpo import dpo_loss
from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.engine_api import LossFn


def pair_batch(seed: int = 0, pairs: int = 5, max_len: int = 9) -> PackedBatch:
    """Ragged pairs: lengths from 1, masks with holes, an answer without a trained token, margins of either sign."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_len + 1, (2 * pairs,), generator=g)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) > 0.4
    if pairs:
        mask[: int(lengths[0])] = False
    ids = torch.arange(pairs).repeat_interleave(2)
    return PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.randint(0, 99, (total,), generator=g),
            "loss_mask": mask,
            "ref_logprobs": -torch.rand(total, generator=g, dtype=torch.float64),
        },
        {
            "pair_ids": ids,
            "margins": torch.randn(pairs, generator=g, dtype=torch.float64).repeat_interleave(2),
        },
    )


def output_of(values: torch.Tensor) -> TokenOutput:
    return TokenOutput(logprobs=values, values=values)


def random_values(batch: PackedBatch, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_tokens, generator=g, dtype=torch.float64).requires_grad_()


def bradley_terry_formula(values: torch.Tensor, batch: PackedBatch, center: float) -> torch.Tensor:
    ends, total = batch.cu_seqlens.tolist(), torch.zeros((), dtype=torch.float64)
    for pair in range(batch.num_seqs // 2):
        chosen, rejected = values[ends[2 * pair + 1] - 1], values[ends[2 * pair + 2] - 1]
        odds = torch.exp(-(chosen - rejected - batch["margins"][2 * pair]))
        total = total + torch.log(1 + odds) + center * (chosen + rejected) ** 2
    return total


def dpo_formula(logprobs: torch.Tensor, batch: PackedBatch, *, beta: float, loss: str, smooth: float) -> torch.Tensor:
    ends, total = batch.cu_seqlens.tolist(), torch.zeros((), dtype=torch.float64)
    for pair in range(batch.num_seqs // 2):
        ratios = []
        for seq in (2 * pair, 2 * pair + 1):
            tokens = [t for t in range(ends[seq], ends[seq + 1]) if batch["loss_mask"][t]]
            ratios.append(sum(logprobs[t] - batch["ref_logprobs"][t] for t in tokens) + torch.zeros(()).double())
        h = ratios[0] - ratios[1]
        if loss == "ipo":
            total = total + (h - 1 / (2 * beta)) ** 2
        else:
            p = 1 / (1 + torch.exp(-beta * h))
            total = total - (1 - smooth) * torch.log(p) - smooth * torch.log(1 - p)
    return total


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_bradley_terry_when_ragged_equals_formula_with_gradient(seed: int, center: float) -> None:
    # Arrange
    batch = pair_batch(seed)
    values = random_values(batch)

    # Act
    actual = bradley_terry_loss(center_coef=center)(output_of(values), batch).loss
    expected = bradley_terry_formula(values, batch, center)

    # Assert
    assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert_close(
        torch.autograd.grad(actual, values)[0], torch.autograd.grad(expected, values)[0], rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize(("loss", "smooth"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_dpo_when_ragged_equals_formula_with_gradient(seed: int, loss: str, smooth: float) -> None:
    # Arrange
    batch = pair_batch(seed)
    logprobs = random_values(batch)
    loss_fn = dpo_loss(beta=0.3, loss=loss, label_smoothing=smooth)  # type: ignore[arg-type]

    # Act
    actual = loss_fn(output_of(logprobs), batch).loss
    expected = dpo_formula(logprobs, batch, beta=0.3, loss=loss, smooth=smooth)

    # Assert
    assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert_close(
        torch.autograd.grad(actual, logprobs)[0], torch.autograd.grad(expected, logprobs)[0], rtol=1e-9, atol=1e-10
    )


LOSSES: dict[str, LossFn] = {
    "rw": bradley_terry_loss(center_coef=0.1),
    "dpo": dpo_loss(beta=0.2, label_smoothing=0.1),
    "ipo": dpo_loss(beta=0.2, loss="ipo"),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 5))
def test_pair_loss_when_split_and_reordered_is_the_same(name: str, seed: int, cut: int) -> None:
    # Arrange: pairs in another order, in two micro-batches, one of which may be empty.
    batch = pair_batch(seed)
    batch = batch.with_tokens(output=random_values(batch).detach())
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [[s for p in chosen for s in (2 * p, 2 * p + 1)] for chosen in (order[:cut], order[cut:])]

    def run(part: PackedBatch) -> LossOutput:
        return LOSSES[name](output_of(part["output"]), part)

    # Act
    whole, pieces = run(batch), [run(batch.select(part)) for part in parts]

    # Assert
    assert_close(sum(piece.loss for piece in pieces), whole.loss, rtol=1e-10, atol=1e-10)
    for stat, (total, count) in whole.stats.items():
        assert_close(sum(p.stats[stat][0] for p in pieces), total, rtol=1e-10, atol=1e-10)
        assert_close(sum(p.stats[stat][1] for p in pieces), count, rtol=0, atol=0)
    assert sum(float(pair_weight(batch.select(part))) for part in parts) == float(pair_weight(batch)) == 5


def test_pair_stats_when_scores_are_known_are_means_over_pairs() -> None:
    # Arrange: two pairs of single tokens; scores 2 over 1, and 0 below 3. The margins asked for are in the loss alone.
    values = torch.tensor([2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    batch = PackedBatch(
        torch.arange(5).int(),
        {
            "input_ids": torch.zeros(4, dtype=torch.int64),
            "loss_mask": torch.ones(4, dtype=torch.bool),
            "ref_logprobs": torch.zeros(4, dtype=torch.float64),
        },
        {"margins": torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)},
    )

    # Act
    rw = {k: float(t / n) for k, (t, n) in bradley_terry_loss()(output_of(values), batch).stats.items()}
    dpo = {k: float(t / n) for k, (t, n) in dpo_loss(beta=0.5)(output_of(values), batch).stats.items()}

    # Assert
    assert rw == {"accuracy": 0.5, "margin": -1.0, "score_chosen": 1.0, "score_rejected": 2.0}
    assert dpo == {
        "accuracy": 0.5,
        "margin": -0.5,
        "reward_chosen": 0.5,
        "reward_rejected": 1.0,
        "logprob_chosen": 1.0,
        "logprob_rejected": 2.0,
    }


def test_dpo_when_policy_is_the_reference_is_log_two() -> None:
    batch = pair_batch()
    loss = dpo_loss(beta=0.1)(output_of(batch["ref_logprobs"]), batch).loss
    assert float(loss) == pytest.approx(5 * math.log(2), abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_pair_loss_when_a_side_is_missing_says_so(name: str) -> None:
    batch = pair_batch().select([0, 1, 2])
    with pytest.raises(ValueError, match="a pair was split"):
        LOSSES[name](output_of(random_values(batch)), batch)
