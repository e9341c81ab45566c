"""Packing trajectories and examples, and selecting sequences out of a packed batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.api.batch import PackedBatch
from areal_core.api.io_struct import Trajectory
from areal_core.data.packing import concat, pack_examples, pack_trajectories, reward_labels

TOKEN_TYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int32,
}
ROW_TYPES = {"rewards": torch.float32, "group_ids": torch.int64, "prompt_lens": torch.int32}


def make_trajectory(length: int, prompt: int, seed: int, **fields) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= prompt
    return Trajectory(
        input_ids=rng.integers(0, 1000, length),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0),
        versions=np.where(mask, 4, -1),
        reward=float(rng.standard_normal()),
        **fields,
    )


def test_pack_trajectories_when_ragged_expected_every_sequence_back() -> None:
    trajectories = [make_trajectory(n, p, n, group_id=g) for n, p, g in [(5, 2, "x"), (1, 1, "y"), (9, 3, "x")]]

    batch = pack_trajectories(trajectories)

    assert {k: v.dtype for k, v in batch.tokens.items()} == TOKEN_TYPES
    assert {k: v.dtype for k, v in batch.rows.items()} == ROW_TYPES
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 15]
    for name in TOKEN_TYPES:
        for piece, trajectory in zip(batch.sequences(name), trajectories, strict=True):
            np.testing.assert_array_equal(piece.numpy(), getattr(trajectory, name))
    np.testing.assert_array_equal(batch["rewards"], np.array([t.reward for t in trajectories], np.float32))
    assert batch["group_ids"].tolist() == [0, 1, 0]
    assert batch["prompt_lens"].tolist() == [2, 1, 3]


def test_pack_trajectories_when_none_expected_empty_batch_with_the_same_types() -> None:
    batch = pack_trajectories([])

    assert (batch.num_seqs, batch.num_tokens) == (0, 0)
    assert {k: v.dtype for k, v in batch.tokens.items()} == TOKEN_TYPES
    assert {k: v.dtype for k, v in batch.rows.items()} == ROW_TYPES


def test_pack_trajectories_when_some_have_token_rewards_expected_zeros_for_the_rest() -> None:
    plain, rewarded = make_trajectory(3, 1, 0), make_trajectory(2, 1, 1, token_rewards=[0.0, 0.5])

    batch = pack_trajectories([plain, rewarded])

    assert batch["token_rewards"].tolist() == [0, 0, 0, 0, 0.5]
    assert "token_rewards" not in pack_trajectories([plain])


def test_pack_trajectories_when_some_lack_a_named_reward_expected_nan_and_columns_as_they_first_appear() -> None:
    trajectories = [
        make_trajectory(2, 1, 0),
        make_trajectory(2, 1, 1, rewards={"style": 0.25, "answer": 1.0}),
        make_trajectory(2, 1, 2, rewards={"answer": 0.0, "bonus": 2.0}),
    ]

    terms = pack_trajectories(trajectories)["reward_terms"]

    assert reward_labels(trajectories) == ["style", "answer", "bonus"]
    nan = math.nan
    expected = torch.tensor([[nan, nan, nan], [0.25, 1.0, nan], [nan, 0.0, 2.0]])
    torch.testing.assert_close(terms, expected, rtol=0, atol=0, equal_nan=True)
    assert "reward_terms" not in pack_trajectories(trajectories[:1])


def test_pack_trajectories_when_group_is_unset_expected_a_group_each() -> None:
    trajectories = [make_trajectory(2, 1, i, group_id=g) for i, g in enumerate(["", "b", "", "b"])]

    assert pack_trajectories(trajectories)["group_ids"].tolist() == [0, 1, 2, 1]


def test_pack_trajectories_when_batch_changes_expected_trajectories_untouched() -> None:
    trajectory = make_trajectory(4, 1, 0)
    before = trajectory.input_ids.copy()

    pack_trajectories([trajectory])["input_ids"].zero_()

    np.testing.assert_array_equal(trajectory.input_ids, before)


def test_pack_examples_when_lists_or_arrays_expected_packed() -> None:
    batch = pack_examples(
        [
            {"input_ids": [3, 4], "loss_mask": [0, 1]},
            {"input_ids": np.array([5]), "loss_mask": np.array([True])},
        ]
    )

    assert batch["input_ids"].tolist() == [3, 4, 5]
    assert batch["loss_mask"].tolist() == [False, True, True]
    assert batch["loss_mask"].dtype == torch.bool
    assert batch.rows == {}
    assert pack_examples([])["input_ids"].dtype == torch.int64


def test_pack_examples_when_lengths_differ_expected_error() -> None:
    with pytest.raises(ValueError, match="example 0: input_ids has 2 entries, but loss_mask has 1"):
        pack_examples([{"input_ids": [1, 2], "loss_mask": [1]}])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), max_size=8),
    picks=st.lists(st.integers(0, 7), max_size=12),
)
def test_select_when_any_order_expected_the_slices(lengths: list[int], picks: list[int]) -> None:
    picks = [p for p in picks if p < len(lengths)]
    total = sum(lengths)
    bounds = np.cumsum([0, *lengths])
    batch = PackedBatch(
        torch.from_numpy(bounds.astype(np.int32)),
        {"input_ids": torch.arange(total), "hidden": torch.arange(total * 2).reshape(total, 2)},
        {"rewards": torch.arange(len(lengths)).float()},
    )

    chosen = batch.select(picks)

    for name in batch.tokens:
        expected = torch.cat([batch.tokens[name][:0], *(batch.tokens[name][bounds[p] : bounds[p + 1]] for p in picks)])
        torch.testing.assert_close(chosen.tokens[name], expected, rtol=0, atol=0)
    assert chosen.seqlens.tolist() == [lengths[p] for p in picks]
    assert chosen["rewards"].tolist() == [float(p) for p in picks]
    assert chosen.cu_seqlens.dtype == torch.int32


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), cut=st.integers(0, 8))
def test_concat_when_batch_was_cut_expected_the_batch(lengths: list[int], cut: int) -> None:
    whole = pack_trajectories([make_trajectory(n, 1, i, group_id=str(i % 3)) for i, n in enumerate(lengths)])
    indices = list(range(len(lengths)))

    joined = concat([whole.select(indices[:cut]), whole.select(indices[cut:])])

    assert joined.cu_seqlens.dtype == torch.int32
    assert joined.cu_seqlens.tolist() == whole.cu_seqlens.tolist()
    for name in (*whole.tokens, *whole.rows):
        torch.testing.assert_close(joined[name], whole[name], rtol=0, atol=0)


def test_concat_when_tensors_differ_expected_error() -> None:
    batch = pack_trajectories([make_trajectory(3, 1, 0)])

    with pytest.raises(ValueError, match="batch 1 has the tokens"):
        concat([batch, batch.with_tokens(advantages=torch.zeros(3))])
    with pytest.raises(ValueError, match="at least one batch"):
        concat([])


def test_batch_when_changed_expected_images_of_its_sequences() -> None:
    shared = {"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    other = {"pixel_values": torch.zeros(6, 2)}
    images = [shared, {}, shared, other]
    trajectories = [make_trajectory(5, 2, i, multi_modal_input=part) for i, part in enumerate(images)]

    batch = pack_trajectories(trajectories)
    changed = batch.with_tokens(values=torch.zeros(20)).with_rows(x=torch.zeros(4)).select([3, 0, 2]).to("cpu")
    joined = concat([batch.select([3]), pack_trajectories(trajectories[1:2]), batch.select([])])

    assert batch.multi_modal_input is not None and changed.multi_modal_input is not None
    assert all(found is part for found, part in zip(batch.multi_modal_input, images, strict=True))
    torch.testing.assert_close([dict(p) for p in changed.multi_modal_input], [other, shared, shared], rtol=0, atol=0)
    assert changed.multi_modal_input[1] is changed.multi_modal_input[2]
    assert joined.multi_modal_input == [other, {}]
    assert pack_trajectories(trajectories[1:2]).multi_modal_input is None


def test_batch_when_images_are_not_one_per_sequence_expected_error() -> None:
    batch = pack_trajectories([make_trajectory(5, 2, 0)])

    with pytest.raises(ValueError, match="multi_modal_input has 2 entries, but the batch has 1 sequences"):
        PackedBatch(batch.cu_seqlens, batch.tokens, batch.rows, [{}, {}])
