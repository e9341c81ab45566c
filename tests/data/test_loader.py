"""Order, epochs and exact resume of the data loader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.data.loader import DataLoader
from areal_core.errors import BadInputError


def make_rows(count: int) -> list[dict[str, Any]]:
    return [{"value": i} for i in range(count)]


def take(loader: DataLoader, batches: int) -> list[list[str]]:
    return [[row["_uid"] for row in loader.next_batch()] for _ in range(batches)]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 30),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    before=st.integers(0, 12),
)
def test_resume_when_stopped_anywhere_expected_the_same_batches(
    size: int, batch_size: int, shuffle: bool, drop_last: bool, seed: int, before: int
) -> None:
    if drop_last:
        batch_size = min(batch_size, size)
    straight = DataLoader(make_rows(size), batch_size, shuffle, seed, drop_last)
    stopped = DataLoader(make_rows(size), batch_size, shuffle, seed, drop_last)
    expected = take(straight, before + 10)[before:]

    take(stopped, before)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = DataLoader(make_rows(size), batch_size, shuffle, seed + 1, drop_last)
    resumed.load_state_dict(state)

    assert take(resumed, 10) == expected
    assert resumed.state_dict() == straight.state_dict()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 30), batch_size=st.integers(1, 30), drop_last=st.booleans())
def test_epoch_when_walked_expected_every_row_at_most_once(size: int, batch_size: int, drop_last: bool) -> None:
    if drop_last:
        batch_size = min(batch_size, size)
    loader = DataLoader(make_rows(size), batch_size, shuffle=True, seed=3, drop_last=drop_last)

    for epoch in range(3):
        assert loader.epoch == epoch
        rows = [row for _ in range(len(loader)) for row in loader.next_batch()]
        indices = [row["_index"] for row in rows]
        assert len(set(indices)) == len(indices)
        assert len(indices) == (size // batch_size * batch_size if drop_last else size)
        assert all(row["_uid"] == f"{epoch}-{row['_index']}" and row["value"] == row["_index"] for row in rows)


def test_order_when_shuffled_expected_to_depend_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = DataLoader(make_rows(64), 64, shuffle=True, seed=seed)
        loader.load_state_dict({"epoch": epoch, "position": 0, "seed": seed})
        return [row["_index"] for row in loader.next_batch()]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]

    assert len({tuple(o) for o in orders}) == 9
    assert order(1, 2) == order(1, 2)
    assert order(1, 0) != list(range(64))


def test_order_when_not_shuffled_expected_the_datasets() -> None:
    loader = DataLoader(make_rows(5), 2, shuffle=False)

    assert take(loader, 3) == [["0-0", "0-1"], ["0-2", "0-3"], ["1-0", "1-1"]]


def test_last_batch_when_kept_expected_short() -> None:
    loader = DataLoader(make_rows(5), 2, shuffle=False, drop_last=False)

    assert len(loader) == 3
    assert take(loader, 4) == [["0-0", "0-1"], ["0-2", "0-3"], ["0-4"], ["1-0", "1-1"]]


def test_rows_when_changed_expected_dataset_untouched() -> None:
    rows = make_rows(2)
    loader = DataLoader(rows, 2)

    loader.next_batch()[0]["value"] = "changed"

    assert rows == make_rows(2)


def test_position_when_a_row_cannot_be_read_expected_unchanged() -> None:
    class Flaky:
        broken = True

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            if self.broken:
                raise OSError("no such file")
            return {"value": index}

    dataset = Flaky()
    loader = DataLoader(dataset, 1, shuffle=False)
    with pytest.raises(OSError, match="no such file"):
        loader.next_batch()
    dataset.broken = False

    assert take(loader, 1) == [["0-0"]]


def test_loader_when_dataset_is_smaller_than_a_batch_expected_error_with_both_numbers() -> None:
    with pytest.raises(BadInputError, match="batch_size is 8, but the dataset has only 3 rows"):
        DataLoader(make_rows(3), 8)


def test_loader_when_dataset_is_empty_expected_error() -> None:
    with pytest.raises(BadInputError, match="the dataset is empty"):
        DataLoader([], 1)
    with pytest.raises(BadInputError, match="the dataset is empty"):
        DataLoader([], 1, drop_last=False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0, "position": 0, "seed": 1, "dataset_size": 9}, "with 9 rows, but this one has 4"),
        ({"epoch": 0, "position": 5, "seed": 1}, "position 5 is no place"),
        ({"epoch": -1, "position": 0, "seed": 1}, "epoch -1"),
        ({"epoch": 0}, "not a data loader's state"),
        ({"epoch": "x", "position": 0, "seed": 1}, "not a data loader's state"),
    ],
)
def test_resume_when_state_does_not_fit_expected_error_and_no_change(state: dict[str, Any], message: str) -> None:
    loader = DataLoader(make_rows(4), 2, seed=1)
    take(loader, 1)
    before = loader.state_dict()

    with pytest.raises(BadInputError, match=message):
        loader.load_state_dict(state)

    assert loader.state_dict() == before


def test_row_when_not_a_dict_expected_error() -> None:
    with pytest.raises(BadInputError, match="row 0 of the dataset is a int"):
        DataLoader([1, 2], 1, shuffle=False).next_batch()


def test_rows_when_saved_hold_their_place_alone_and_load_again() -> None:
    # Arrange: a column that no JSON holds
    rows = [{"n": index, "image": object()} for index in range(4)]
    loader = DataLoader(rows, 2, seed=1)
    drawn = [row for _ in range(4) for row in loader.next_batch()]

    # Act
    saved = json.loads(json.dumps([loader.save_row(row) for row in drawn]))
    loaded = [DataLoader(rows, 2, seed=1).load_row(row) for row in saved]

    # Assert
    assert all(row.keys() == {"_uid", "_index"} for row in saved)
    assert loaded == drawn and drawn[-1]["_uid"].startswith("1-")


def test_row_when_saved_whole_is_loaded_as_it_was() -> None:
    row = {"n": 7, "_uid": "0-9", "_index": 9}

    assert DataLoader(make_rows(4), 2).load_row(row) == row


def test_row_when_the_dataset_has_become_smaller_expected_error() -> None:
    with pytest.raises(BadInputError, match="row 9 of its dataset, but this one has 4"):
        DataLoader(make_rows(4), 2).load_row({"_uid": "0-9", "_index": 9})


def test_resume_when_the_saved_seed_is_another_expected_its_order_after_batches_of_ones_own() -> None:
    # Arrange: both are in their first epoch, and the one that resumes has used its own order.
    rows = [{"n": i} for i in range(20)]
    saved, resumed = DataLoader(rows, 4, seed=1), DataLoader(rows, 4, seed=2)
    saved.next_batch()
    resumed.next_batch()

    # Act
    resumed.load_state_dict(saved.state_dict())

    # Assert
    assert resumed.next_batch() == saved.next_batch()
