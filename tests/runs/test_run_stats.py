from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from areal_core.stats import StatsTracker


def test_ratio_when_split_over_micro_batches_then_it_equals_the_whole() -> None:
    values = torch.arange(12, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    whole, parts = StatsTracker(), StatsTracker()

    whole.ratio("x", (values * mask).sum(), mask.sum())
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        parts.ratio("x", (values[part] * mask[part]).sum(), mask[part].sum())

    expected = (0 + 2 + 3 + 8 + 9 + 10 + 11) / 7
    assert parts.export()["x"] == pytest.approx(expected, rel=1e-12)
    assert whole.export()["x"] == pytest.approx(expected, rel=1e-12)


def test_ratio_when_given_tensors_then_the_callers_are_neither_changed_nor_kept_in_a_graph() -> None:
    total = torch.tensor(3.0, requires_grad=True)
    stats = StatsTracker()

    stats.ratio("x", total * 2, torch.tensor(2.0))
    first = torch.tensor(5.0)
    stats.ratio("y", first, 1)
    stats.ratio("y", torch.tensor(7.0), 1)

    assert stats.export() == {"x": 3.0, "y": 6.0}
    assert first.item() == 5.0


def test_ratio_when_the_count_is_zero_then_it_is_left_out() -> None:
    stats = StatsTracker()

    stats.ratio("x", 0.0, 0)

    assert stats.export() == {}


def test_export_when_everything_is_recorded_then_the_dict_is_flat_and_sorted() -> None:
    stats = StatsTracker()
    stats.scalar("lr", 1.0)
    stats.scalar("lr", 0.5)
    stats.scalars({"b": 2, "a": torch.tensor(1)}, prefix="p")
    stats.mean("m", 1)
    stats.mean("m", 4)
    for value in (3, -1, 2):
        stats.minimum("least", value)
        stats.maximum("most", value)
    stats.count("n", 2)
    stats.count("n")
    stats.add_time("train", 1.5)
    stats.add_time("train", 0.5)

    result = stats.export()

    assert result == {
        "lr": 0.5,
        "p/a": 1.0,
        "p/b": 2.0,
        "m": 2.5,
        "least": -1.0,
        "most": 3.0,
        "n": 3.0,
        "time/train_s": 2.0,
    }
    assert list(result) == sorted(result)
    assert all(type(value) is float for value in result.values())


def test_export_when_reset_then_only_counters_stay() -> None:
    stats = StatsTracker()
    stats.scalar("a", 1)
    stats.count("n")

    assert stats.export(reset=False) == {"a": 1.0, "n": 1.0}
    assert stats.export() == {"a": 1.0, "n": 1.0}
    assert stats.export() == {"n": 1.0}


def test_count_when_negative_then_error() -> None:
    with pytest.raises(ValueError, match="cannot fall"):
        StatsTracker().count("n", -1)


def test_state_dict_when_loaded_then_counters_go_on() -> None:
    stats = StatsTracker()
    stats.count("n", 5)

    restored = StatsTracker()
    restored.load_state_dict(stats.state_dict())
    restored.count("n")

    assert restored.export() == {"n": 6.0}


def test_time_when_the_block_raises_then_it_is_measured_all_the_same() -> None:
    stats = StatsTracker()

    with pytest.raises(KeyError), stats.time("x"):
        raise KeyError

    assert stats.export()["time/x_s"] >= 0


def test_tracker_when_many_threads_record_then_nothing_is_lost() -> None:
    stats = StatsTracker()

    def work() -> None:
        for _ in range(2000):
            stats.count("n")
            stats.ratio("r", 2, 1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert stats.export() == {"n": 16000.0, "r": 2.0}


class Ranks:
    """Reduces over threads that stand for ranks, by the contract of ``ReduceFn``."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.shared: list[Any] = [None] * size

    def reducer(self, rank: int) -> Any:
        combine = {"sum": lambda a, b: a + b, "min": min, "max": max}

        def reduce(op: str, values: dict[str, float]) -> dict[str, float]:
            self.shared[rank] = (op, values)
            self.barrier.wait(timeout=30)
            assert len({op for op, _ in self.shared}) == 1
            result: dict[str, float] = {}
            for _, mine in self.shared:
                for name, value in mine.items():
                    result[name] = combine[op](result[name], value) if name in result else value
            self.barrier.wait(timeout=30)
            return result

        return reduce


def test_export_when_ranks_differ_then_they_are_combined_and_equal_everywhere() -> None:
    ranks = Ranks(2)
    results: list[dict[str, float]] = [{}, {}]

    def work(rank: int) -> None:
        stats = StatsTracker(reduce=ranks.reducer(rank))
        stats.ratio("loss", [6.0, 1.0][rank], [2, 5][rank])
        stats.scalar("lr", [1.0, 3.0][rank])
        stats.minimum("lo", [4, -4][rank])
        stats.maximum("hi", [4, -4][rank])
        stats.count("tokens", [10, 5][rank])
        stats.add_time("train", [1.0, 2.0][rank])
        if rank == 1:
            stats.ratio("only one rank", 3, 4)
        results[rank] = stats.export()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results[0] == results[1]
    assert results[0] == {
        "loss": 1.0,
        "lr": 2.0,
        "lo": -4.0,
        "hi": 4.0,
        "tokens": 15.0,
        "time/train_s": 2.0,
        "only one rank": 0.75,
    }
