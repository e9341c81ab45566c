"""A training run on images: `vision_rlvr` on a tiny random Qwen2.5-VL."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import trainer_vision
from trainer_harness import areal, read_metrics, torchrun, write_yaml

from areal_core.runs.trajectories import iter_trajectories


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainer_vision.write_model_folder(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def plain(vision_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer": "rl",
        "seed": 3,
        "total_train_steps": 2,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": "vision"},
        "actor": {"path": str(vision_model), "dtype": "float32", "optimizer": {"lr": 1e-3, "weight_decay": 0.0}},
        "rollout": {"backend": "local"},
        "workflow": {"name": "vision_rlvr"},
        "gconfig": {"n_samples": 3, "max_new_tokens": 5},
        "reward": {"name": "trainer_vision:colour_reward_fn"},
        "train_dataset": {"name": "trainer_vision:colours_dataset", "batch_size": 8},
        "evaluation": {"at_end": False},
        "checkpoint": {"keep_best": 0},
    }


def check_run(path: Path, model: Path) -> None:
    lines = read_metrics(path)
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert line["rollout/accepted"] == 24
        assert line["train/logprob_gap_max"] < 1e-4
    assert lines[0]["train/grad_norm"] > 0
    episodes = [e for e in iter_trajectories(path) if e["outcome"] == "accepted"]
    shapes = {json.dumps(e.get("multi_modal_input")) for e in episodes}
    # 16 x 16 pixels are 4 x 4 patches of 3 * 2 * 4 * 4 numbers.
    assert shapes == {
        '{"pixel_values": [16, 96], "image_grid_thw": [1, 3]}',
        '{"pixel_values": [32, 96], "image_grid_thw": [2, 3]}',
        '{"pixel_values": [36, 96], "image_grid_thw": [1, 3]}',
        "null",
    }
    for episode in episodes:
        assert "pixel" not in json.dumps(episode["metadata"])
        images = episode["prompt"].count("<image>")
        expected = (episode.get("multi_modal_input") or {"pixel_values": [0]})["pixel_values"][0] // 4
        # The prompt is shown with one placeholder for each image; the model reads one for each feature.
        assert images == (0 if expected == 0 else 2 if expected == 8 else 1)
        assert episode["input_ids"][: episode["prompt_len"]].count(trainer_vision.IMAGE) == expected
    final = path / "weights" / "final"
    assert (final / "preprocessor_config.json").read_text() == (model / "preprocessor_config.json").read_text()


def test_train_when_prompts_have_images_expected_gap_of_rounding_and_shapes_on_disk(
    plain: dict[str, Any], tmp_path: Path, vision_model: Path
) -> None:
    result = areal("train", write_yaml(tmp_path / "run.yaml", plain))

    assert result.returncode == 0, result.stderr
    check_run(tmp_path / "runs" / "vision", vision_model)


@pytest.mark.slow
def test_train_when_on_two_ranks_expected_the_same(plain: dict[str, Any], tmp_path: Path, vision_model: Path) -> None:
    plain["actor"]["backend"] = "fsdp:d2"

    result = torchrun(2, "train", write_yaml(tmp_path / "run.yaml", plain))

    assert result.returncode == 0, result.stderr
    check_run(tmp_path / "runs" / "vision", vision_model)


def test_train_when_model_reads_text_only_expected_error_naming_the_folder(
    plain: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    plain["actor"]["path"] = str(tiny_model)

    result = areal("train", write_yaml(tmp_path / "run.yaml", plain))

    assert result.returncode == 2
    assert f"tokenizer_path: '{tiny_model}' has no processor for images" in result.stderr
    assert "Traceback" not in result.stderr
