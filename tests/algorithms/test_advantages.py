"""Advantages and the scans under them, against loops over single sequences in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.advantages import action_rewards, broadcast_advantages, gae, rewards_to_go
from areal_core.algorithms.segments import (
    dense_groups,
    expand_rows,
    last_masked,
    next_masked,
    reverse_scan,
    sequence_index,
)
from areal_core.api.batch import PackedBatch

BatchOf = Callable[..., PackedBatch]


def reference_gae(
    batch: PackedBatch, rewards: torch.Tensor, values: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float64)
    returns = torch.zeros(batch.num_tokens, dtype=torch.float64)
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        actions = [t for t in range(start, end) if batch["loss_mask"][t]]
        next_value = next_advantage = 0.0
        for t in reversed(actions):
            delta = float(rewards[t]) + discount * next_value - float(values[t])
            next_advantage = delta + discount * gae_lambda * next_advantage
            next_value = float(values[t])
            advantages[t] = next_advantage
            returns[t] = next_advantage + next_value
    return advantages, returns


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_when_ragged_with_turns_expected_loop(
    batch_of: BatchOf, seed: int, discount: float, gae_lambda: float
) -> None:
    batch = batch_of(seed, num_seqs=11)
    rewards = torch.where(batch["loss_mask"], torch.randn(batch.num_tokens).double(), 0.0)

    advantages, returns = gae(rewards, batch["values"], batch["loss_mask"], batch.cu_seqlens, discount, gae_lambda)

    expected_advantages, expected_returns = reference_gae(batch, rewards, batch["values"], discount, gae_lambda)
    torch.testing.assert_close(advantages, expected_advantages, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, expected_returns, rtol=1e-9, atol=1e-9)


def test_gae_when_values_stand_at_untrained_tokens_expected_not_read(batch_of: BatchOf) -> None:
    batch = batch_of(2)
    poisoned = torch.where(batch["loss_mask"], batch["values"], torch.nan)
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)

    clean = gae(rewards, batch["values"], batch["loss_mask"], batch.cu_seqlens, 0.9, 0.9)
    result = gae(rewards, poisoned, batch["loss_mask"], batch.cu_seqlens, 0.9, 0.9)

    torch.testing.assert_close(result, clean, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), order_seed=st.integers(0, 1000))
def test_gae_when_sequences_are_reordered_expected_the_same(seed: int, order_seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (6,), generator=g)
    total = int(lengths.sum())
    batch = PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.arange(total),
            "loss_mask": torch.rand(total, generator=g) > 0.5,
            "rewards_": torch.randn(total, generator=g, dtype=torch.float64),
            "values": torch.randn(total, generator=g, dtype=torch.float64),
        },
    )
    order = torch.randperm(6, generator=torch.Generator().manual_seed(order_seed)).tolist()

    def run(b: PackedBatch) -> PackedBatch:
        advantages, returns = gae(b["rewards_"], b["values"], b["loss_mask"], b.cu_seqlens, 0.9, 0.8)
        return b.with_tokens(advantages=advantages, returns=returns)

    straight, reordered = run(batch).select(order), run(batch.select(order))

    torch.testing.assert_close(reordered["advantages"], straight["advantages"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reordered["returns"], straight["returns"], rtol=1e-12, atol=1e-12)


def test_rewards_to_go_when_undiscounted_expected_sum_of_what_follows() -> None:
    mask = torch.tensor([False, True, True, False, True, True])
    rewards = torch.tensor([0.0, 1.0, 2.0, 0.0, 4.0, 8.0])

    result = rewards_to_go(rewards, mask, torch.tensor([0, 5, 6], dtype=torch.int32), 1.0)

    assert result.tolist() == [0, 7, 6, 0, 4, 8]


def test_rewards_to_go_when_turns_are_apart_expected_only_actions_discounted() -> None:
    mask = torch.tensor([False, True, False, False, True])

    result = rewards_to_go(torch.tensor([0.0, 0, 0, 0, 1.0]), mask, torch.tensor([0, 5], dtype=torch.int32), 0.5)

    assert result.tolist() == [0, 0.5, 0, 0, 1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_token_rewards", [False, True])
def test_action_rewards_when_ragged_expected_loop(batch_of: BatchOf, seed: int, with_token_rewards: bool) -> None:
    batch = batch_of(seed)
    token_rewards = torch.randn(batch.num_tokens).double() if with_token_rewards else None

    result = action_rewards(batch["rewards"], batch["loss_mask"], batch.cu_seqlens, token_rewards)

    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    bounds = batch.cu_seqlens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        latest = None
        for t in range(start, end):
            latest = t if batch["loss_mask"][t] else latest
            if latest is not None and token_rewards is not None:
                expected[latest] += token_rewards[t]
        if latest is not None:
            expected[latest] += batch["rewards"][row]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_broadcast_expected_sequence_value_at_trained_tokens(batch_of: BatchOf) -> None:
    batch = batch_of(1)
    rows = torch.randn(batch.num_seqs).double()

    result = broadcast_advantages(rows, batch["loss_mask"], batch.cu_seqlens)

    for piece, mask, value in zip(
        batch.with_tokens(x=result).sequences("x"), batch.sequences("loss_mask"), rows.tolist(), strict=True
    ):
        assert piece.tolist() == [value if trained else 0.0 for trained in mask.tolist()]


def test_advantages_when_batch_is_empty_expected_empty() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)

    assert broadcast_advantages(nothing, none, cu_seqlens).shape == (0,)
    assert action_rewards(nothing, none, cu_seqlens, nothing).shape == (0,)
    assert [t.shape for t in gae(nothing, nothing, none, cu_seqlens, 0.9, 0.9)] == [(0,), (0,)]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=8), seed=st.integers(0, 999))
def test_masked_neighbours_expected_loop(lengths: list[int], seed: int) -> None:
    total = sum(lengths)
    mask = torch.rand(total, generator=torch.Generator().manual_seed(seed)) > 0.5
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

    index = sequence_index(cu_seqlens, total)
    last, following = last_masked(mask, index), next_masked(mask, index)

    owners = [row for row, n in enumerate(lengths) for _ in range(n)]
    assert index.tolist() == owners
    for t in range(total):
        same = [s for s in range(total) if owners[s] == owners[t] and mask[s]]
        assert int(last[t]) == max((s for s in same if s <= t), default=-1)
        assert int(following[t]) == min((s for s in same if s > t), default=-1)
    rows = torch.arange(len(lengths)).double()
    assert expand_rows(rows, cu_seqlens, total).tolist() == owners


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40), seed=st.integers(0, 999))
def test_reverse_scan_expected_recurrence(size: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    values, decay = torch.randn(size, generator=g).double(), torch.rand(size, generator=g).double()

    result = reverse_scan(values, decay)

    expected, carried = [0.0] * size, 0.0
    for t in reversed(range(size)):
        carried = expected[t] = float(values[t]) + float(decay[t]) * carried
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(ids=st.lists(st.integers(-5, 5)))
def test_dense_groups_expected_rank_of_the_id(ids: list[int]) -> None:
    result = dense_groups(torch.tensor(ids, dtype=torch.int64))

    ranks = {group: rank for rank, group in enumerate(sorted(set(ids)))}
    assert result.tolist() == [ranks[group] for group in ids]
