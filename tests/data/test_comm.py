"""Scatter and gather between two gloo processes, and in a single one."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from areal_core.api.batch import PackedBatch
from areal_core.data.comm import broadcast_json, gather_tensors, gather_tokens, scatter_batches


def make_batch() -> PackedBatch:
    lengths = torch.tensor([3, 1, 4, 2])
    total = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    return PackedBatch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        {
            "input_ids": torch.arange(total) * 7,
            "loss_mask": torch.rand(total, generator=generator) > 0.5,
            "logprobs": torch.randn(total, generator=generator),
            "half": torch.randn(total, 3, generator=generator).bfloat16(),
        },
        {
            "rewards": torch.randn(4, generator=generator),
            "group_ids": torch.tensor([0, 0, 1, 1]),
            "reward_terms": torch.randn(4, 2, generator=generator),
        },
    )


def make_image_batch() -> PackedBatch:
    """Two samples of a prompt with an image, one of a prompt with two, and one without."""
    batch = make_batch()
    shared = {"pixel_values": torch.randn(6, 5), "image_grid_thw": torch.tensor([[1, 2, 3]])}
    two = {"pixel_values": torch.randn(8, 5), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    batch.multi_modal_input = [shared, shared, two, {}]
    return batch


def assert_same(actual: PackedBatch, expected: PackedBatch) -> None:
    assert list(actual.tokens) == list(expected.tokens)
    assert list(actual.rows) == list(expected.rows)
    torch.testing.assert_close(actual.cu_seqlens, expected.cu_seqlens, rtol=0, atol=0)
    for name in (*expected.tokens, *expected.rows):
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    if expected.multi_modal_input is None:
        assert actual.multi_modal_input is None
        return
    assert actual.multi_modal_input is not None
    assert len(actual.multi_modal_input) == len(expected.multi_modal_input)
    for found, images in zip(actual.multi_modal_input, expected.multi_modal_input, strict=True):
        torch.testing.assert_close(dict(found), dict(images), rtol=0, atol=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(
    rank: int, size: int, port: int, check: Callable[[int, dist.ProcessGroup], None], errors: mp.Queue
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        check(rank, dist.new_group(list(range(size)), backend="gloo"))
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
    dist.destroy_process_group()


def run_ranks(size: int, check: Callable[[int, dist.ProcessGroup], None]) -> None:
    context = mp.get_context("spawn")
    errors = context.SimpleQueue()
    port = free_port()
    processes = [context.Process(target=run_rank, args=(r, size, port, check, errors)) for r in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert errors.empty(), errors.get()
    assert not alive
    assert [process.exitcode for process in processes] == [0] * size


def check_everything(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    whole = make_batch()

    message = {"decision": True, "values": [1, 2.5, None], "text": "é"}
    assert broadcast_json(message if rank == 1 else "ignored", group, src=1) == message
    assert broadcast_json(None, group) is None

    parts: list[list[int]] = [[2, 0], [1, 3]]
    shard = scatter_batches([whole.select(p) for p in parts] if rank == 0 else None, group, src=0)
    assert_same(shard, whole.select(parts[rank]))
    back = (
        gather_tokens(shard["logprobs"], whole.cu_seqlens, parts, group)
        if rank == 0
        else gather_tokens(shard["logprobs"], None, None, group)
    )
    if rank == 0:
        torch.testing.assert_close(back, whole["logprobs"], rtol=0, atol=0)
    else:
        assert back is None

    # One rank has nothing at all, once the sender and once the other.
    for empty in (0, 1):
        parts = [[0, 1, 2, 3], [0, 1, 2, 3]]
        parts[empty] = []
        shard = scatter_batches([whole.select(p) for p in parts] if rank == 1 else None, group, src=1)
        assert_same(shard, whole.select(parts[rank]))
        mine = (whole.cu_seqlens, parts) if rank == 1 else (None, None)
        back = gather_tokens(shard["half"], *mine, group, dst=1)
        assert (back is None) == (rank == 0)
        if back is not None:
            torch.testing.assert_close(back, whole["half"], rtol=0, atol=0)

    images = make_image_batch()
    for parts in ([[0, 1, 2], [3]], [[3], [2, 0, 1]], [[0, 1, 2, 3], []], [[], [0, 1, 2, 3]]):
        shard = scatter_batches([images.select(p) for p in parts] if rank == 0 else None, group)
        assert_same(shard, images.select(parts[rank]))
        if len(parts[rank]) > 2:
            assert shard.multi_modal_input is not None
            # What two samples share came once.
            assert len({id(part) for part in shard.multi_modal_input}) == len(parts[rank]) - 1

    gathered = gather_tensors(torch.full((rank, 2), rank, dtype=torch.int32), group, dst=0)
    if rank == 0:
        assert gathered is not None
        assert [tuple(t.shape) for t in gathered] == [(0, 2), (1, 2)]
        assert gathered[1].tolist() == [[1, 1]]

    empty_batch = whole.select([])
    assert_same(scatter_batches([empty_batch, empty_batch] if rank == 0 else None, group), empty_batch)


def test_comm_on_two_processes_when_shards_are_ragged_or_empty() -> None:
    run_ranks(2, check_everything)


def test_comm_when_single_process_expected_no_op() -> None:
    batch = make_batch()

    assert scatter_batches([batch], None) is batch
    assert broadcast_json({"a": (1,)}, None) == {"a": (1,)}
    tensors = gather_tensors(batch["logprobs"], None)
    assert tensors is not None and tensors[0] is batch["logprobs"]


def test_gather_tokens_when_single_process_expected_original_order() -> None:
    batch = make_batch()
    order = [3, 1, 0, 2]

    back = gather_tokens(batch.select(order)["input_ids"], batch.cu_seqlens, [order])

    assert back is not None
    torch.testing.assert_close(back, batch["input_ids"], rtol=0, atol=0)


@pytest.mark.parametrize("batches", [None, [], [make_batch(), make_batch()]])
def test_scatter_when_not_one_batch_per_rank_expected_error(batches: list[PackedBatch] | None) -> None:
    with pytest.raises(ValueError, match="one batch for each of the 1 ranks"):
        scatter_batches(batches, None)
