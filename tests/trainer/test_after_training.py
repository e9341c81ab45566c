"""What a finished run of every trainer is good for: `areal eval` of its weights, `areal convert` of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import read_metrics, weights, write_yaml

from areal_core.api.load import load_run_config
from areal_core.cli.main import run as areal
from areal_core.trainer.run import train


@pytest.fixture
def plain(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    name = request.param.partition("-")[0]
    config: dict[str, Any] = {
        "trainer": name,
        "seed": 3,
        "total_train_steps": 2,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": name},
        "actor": {
            "path": str(tiny_model),
            "dtype": "float32",
            "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        },
        "train_dataset": {"name": "arithmetic", "batch_size": 4, "arithmetic": {"size": 16}},
        "valid_dataset": {"name": "arithmetic", "split": "test", "batch_size": 3, "arithmetic": {"size": 7}},
        "evaluation": {"at_end": True},
        "checkpoint": {"keep_best": 0},
    }
    if name == "distill":
        config |= {
            "teacher": {"path": str(tiny_model), "dtype": "float32"},
            "rollout": {"backend": "local"},
            "gconfig": {"n_samples": 2, "max_new_tokens": 8},
            "reward": {"name": "trainer_rewards:digits_reward_fn"},
        }
    if name == "dpo":
        config["ref"] = {"path": str(tiny_model), "dtype": "float32"}
    if request.param.endswith("-lora"):
        config.pop("ref", None)
        config["actor"]["lora"] = {"rank": 4, "alpha": 8}
    return config


@pytest.mark.parametrize("plain", ["sft", "rw", "dpo", "dpo-lora", "distill"], indirect=True)
def test_eval_when_given_the_weights_of_a_run_repeats_its_last_evaluation(
    plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Arrange: the mesh of the configuration does not matter here.
    path = write_yaml(tmp_path / "run.yaml", plain)
    run = train(load_run_config(path, [])).path
    last = read_metrics(run)[-1]
    meshes = ["actor.backend=fsdp:d4"] + (["teacher.backend=fsdp:d4"] if plain["trainer"] == "distill" else [])
    capsys.readouterr()

    # Act
    code = areal(["eval", str(path), *meshes, "--weights", str(run / "weights" / "final"), "--json"])

    # Assert
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    names = {"distill": {"eval/reward", "eval/completion_len"}, "sft": {"eval/loss"}}.get(
        plain["trainer"], {"eval/loss", "eval/accuracy", "eval/margin"}
    )
    assert names <= found.keys()
    for name in names:
        assert found[name] == pytest.approx(last[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("plain", ["rw", "dpo", "distill"], indirect=True)
def test_convert_when_a_run_was_trained_writes_its_final_weights(
    plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Arrange
    run = train(load_run_config(write_yaml(tmp_path / "run.yaml", plain), [])).path

    # Act
    code = areal(["convert", str(run), str(tmp_path / "out")])

    # Assert
    assert code == 0, capsys.readouterr().err
    expected, found = weights(run / "weights" / "final"), weights(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())

    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if plain["trainer"] == "rw" else AutoModelForCausalLM
    _, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("plain", ["sft"], indirect=True)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("valid_dataset=null", ["valid_dataset", "held-out split"]),
        ("actor.init_from_scratch=true", ["actor.init_from_scratch", "--weights"]),
    ],
)
def test_eval_when_there_is_nothing_to_score_says_so(
    plain: dict[str, Any], override: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = areal(["eval", str(write_yaml(tmp_path / "run.yaml", plain)), override])

    captured = capsys.readouterr()
    assert code == 2
    assert all(word in captured.err for word in words)
