from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_core.errors import BadInputError
from areal_core.runs import trajectories
from areal_core.runs.trajectories import TrajectoryWriter, iter_trajectories, read_vocabulary

Make = Callable[..., Any]


def expand(runs: list[list[int]]) -> list[int]:
    return [value for value, count in runs for _ in range(count)]


def test_write_when_read_back_then_the_line_holds_the_trajectory(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path)
    original = trajectory(
        "ab", "cde", reward=0.5, rewards={"x": 0.5}, metadata={"turn": 1}, stop_reason="length", latency=0.12345
    )

    writer.write(7, original, prompt="ab", completion="cde", outcome="accepted", split="eval")
    writer.close()

    (line,) = iter_trajectories(tmp_path)
    assert (line["step"], line["split"], line["outcome"], line["stop_reason"]) == (7, "eval", "accepted", "length")
    assert (line["prompt"], line["completion"], line["reward"], line["rewards"]) == ("ab", "cde", 0.5, {"x": 0.5})
    assert (line["prompt_len"], line["length"], line["metadata"]) == (2, 5, {"turn": 1})
    assert (line["latency"], line["ttft"]) == (0.1235, None)
    assert line["input_ids"] == original.input_ids.tolist()
    assert expand(line["loss_mask"]) == original.loss_mask.astype(int).tolist()
    assert expand(line["versions"]) == original.versions.tolist()
    np.testing.assert_allclose(line["logprobs"], original.logprobs[original.loss_mask], atol=5e-5)


def test_write_when_there_are_images_then_the_line_holds_their_shapes(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path)

    writer.write(1, trajectory("ab", "c", multi_modal_input={"pixel_values": np.zeros((6, 5))}), prompt="ab")
    writer.close()

    (line,) = iter_trajectories(tmp_path)
    assert line["multi_modal_input"] == {"pixel_values": [6, 5]}


def test_write_when_a_tokenizer_is_set_then_texts_and_vocabulary_are_kept(
    tmp_path: Path, trajectory: Make, tokenizer: Any
) -> None:
    writer = TrajectoryWriter(tmp_path)
    writer.tokenizer = tokenizer

    writer.write(1, trajectory("ab", "c<"))
    writer.close()

    (line,) = iter_trajectories(tmp_path)
    assert (line["prompt"], line["completion"]) == ("ab", "c<")
    assert read_vocabulary(tmp_path) == {ord(c): c for c in "abc<"}


def test_write_when_an_episode_gave_nothing_then_the_line_says_why(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)

    writer.write(1, None, prompt="p", outcome="failed", error="ValueError: no")
    writer.close()

    (line,) = iter_trajectories(tmp_path)
    assert (line["outcome"], line["prompt"], line["error"]) == ("failed", "p", "ValueError: no")


def test_write_when_values_are_not_json_then_the_line_is_valid(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path)

    writer.write(1, trajectory(reward=float("nan"), metadata={"a": np.arange(2), "p": Path("x")}), prompt="\ud800\n")
    writer.close()

    (line,) = iter_trajectories(tmp_path)
    assert line["reward"] is None and line["metadata"] == {"a": [0, 1], "p": "x"}


def test_write_when_many_threads_rotate_then_every_line_is_there_once(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=20_000)

    def work(worker: int) -> None:
        for i in range(100):
            writer.write(1, trajectory(group_id=f"{worker}-{i}"), prompt="p", completion="c" * 50)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()

    groups = [line["group_id"] for line in iter_trajectories(tmp_path)]
    assert sorted(groups) == sorted(f"{w}-{i}" for w in range(8) for i in range(100))
    assert len(list(tmp_path.glob("*.jsonl.zst"))) >= 5
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_write_when_it_is_ahead_of_the_disk_then_it_waits_and_loses_nothing(
    tmp_path: Path, trajectory: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "_MOST_WAITING", 1)
    writer = TrajectoryWriter(tmp_path)
    writer.tokenizer = tokenizer

    for i in range(300):
        writer.write(1, trajectory(completion=chr(200 + i)))
        writer.flush(wait=False)
    writer.close()

    assert [line["completion"] for line in iter_trajectories(tmp_path)] == [chr(200 + i) for i in range(300)]
    assert len(read_vocabulary(tmp_path)) == 300 + len(set("2+2="))


def test_write_when_the_disk_fails_then_it_is_said_once_and_the_run_goes_on(
    tmp_path: Path, trajectory: Make, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    writer = TrajectoryWriter(folder)
    folder.rmdir()

    with caplog.at_level(logging.WARNING, "areal"):
        for _ in range(3):
            writer.write(1, trajectory())
        writer.close()

    assert len(caplog.messages) == 1 and str(folder) in caplog.messages[0]


def test_write_when_closed_then_it_is_dropped(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path)
    writer.write(1, trajectory())
    writer.close()
    writer.close()

    writer.write(2, trajectory())
    writer.flush()

    assert [line["step"] for line in iter_trajectories(tmp_path)] == [1]


def test_writer_when_reopened_then_it_appends_and_never_touches_compressed_files(
    tmp_path: Path, trajectory: Make
) -> None:
    for part in range(3):
        writer = TrajectoryWriter(tmp_path, max_bytes=1500)
        for i in range(5):
            writer.write(part, trajectory(group_id=f"{part}-{i}"))
        writer.close()

    assert [line["group_id"] for line in iter_trajectories(tmp_path)] == [
        f"{p}-{i}" for p in range(3) for i in range(5)
    ]


def test_truncate_when_files_are_compressed_then_later_steps_go_there_too(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=1000)
    for step in range(1, 9):
        writer.write(step, trajectory())
    writer.flush()

    writer.truncate(3)
    writer.write(4, trajectory())
    writer.close()

    assert [line["step"] for line in iter_trajectories(tmp_path)] == [1, 2, 3, 4]


def test_iter_when_a_file_exists_plain_and_compressed_then_it_is_read_once(tmp_path: Path, trajectory: Make) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=1)
    writer.write(1, trajectory())
    writer.close()
    # As a process leaves it that is killed between compressing and removing.
    (tmp_path / "train-00000.jsonl").write_text('{"step": 1}\n')

    assert len(list(iter_trajectories(tmp_path))) == 1
    writer = TrajectoryWriter(tmp_path)
    writer.truncate(5)
    writer.close()
    assert not (tmp_path / "train-00000.jsonl").exists()
    assert len(list(iter_trajectories(tmp_path))) == 1


@pytest.mark.parametrize("torn", ['{"step": 2, "pro', '{"step": 2}', "\x00\x00"])
def test_iter_when_the_last_line_is_torn_then_it_is_skipped(tmp_path: Path, torn: str) -> None:
    (tmp_path / "train-00000.jsonl").write_text('{"step": 1}\n' + torn)

    assert list(iter_trajectories(tmp_path)) == [{"step": 1}]


def test_iter_when_given_a_file_or_a_run_or_nothing_then_it_reads_that(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for split in ("train", "eval"):
        (folder / f"{split}-00000.jsonl").write_text(json.dumps({"split": split}) + "\n")

    assert [line["split"] for line in iter_trajectories(tmp_path)] == ["eval", "train"]
    assert [line["split"] for line in iter_trajectories(tmp_path, split="train")] == ["train"]
    assert [line["split"] for line in iter_trajectories(folder / "train-00000.jsonl")] == ["train"]
    with pytest.raises(BadInputError, match="no such file or folder"):
        list(iter_trajectories(tmp_path / "absent"))
