"""`areal convert`, from a run that trained to a folder that transformers loads, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import weights, write_yaml

from areal_core.api.io_struct import SaveLoadMeta
from areal_core.api.load import load_run_config
from areal_core.cli.main import run as areal
from areal_core.trainer.run import train


@pytest.fixture
def finished(sft_plain: dict[str, Any], tmp_path: Path) -> Path:
    sft_plain["evaluation"] = {"at_end": False}
    sft_plain["total_train_steps"] = 2
    return train(load_run_config(write_yaml(tmp_path / "run.yaml", sft_plain), [])).path


@pytest.mark.parametrize("below", ["", "checkpoints/step-000002", "checkpoints/step-000002/actor"])
def test_convert_when_a_run_was_trained_writes_its_final_weights(
    finished: Path, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Act
    code = areal(["convert", str(finished / below), str(tmp_path / "out")])

    # Assert
    assert code == 0
    assert capsys.readouterr().out == f"{finished}/checkpoints/step-000002/actor (dcp) -> {tmp_path / 'out'}\n"
    expected, found = weights(finished / "weights" / "final"), weights(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    names = {p.name for p in (finished / "weights" / "final").iterdir()}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names

    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("1 + 2", return_tensors="pt")["input_ids"]
    logits = [
        AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (tmp_path / "out", finished / "weights" / "final")
    ]
    assert torch.equal(logits[0], logits[1])


def test_convert_there_and_back_gives_the_same_weights(finished: Path, tmp_path: Path) -> None:
    source = finished / "weights" / "final"

    assert areal(["convert", str(source), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert areal(["convert", str(tmp_path / "dcp"), str(tmp_path / "hf"), "--model", str(source)]) == 0

    expected, found = weights(source), weights(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_convert_to_dcp_makes_what_an_engine_loads(finished: Path, sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    from areal_fsdp.engine import FSDPEngine

    source = finished / "weights" / "final"
    assert areal(["convert", str(source), str(tmp_path / "dcp")]) == 0
    config = load_run_config(tmp_path / "run.yaml", []).actor
    engine = FSDPEngine(config)
    engine.create_process_group(config.parsed_backend.parallel)
    config.optimizer = None
    engine.initialize()

    # Act
    engine.load(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp"))

    # Assert
    expected = weights(source)
    found = dict(engine.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)


@pytest.mark.parametrize("case", ["no folder", "empty", "same format", "target", "no run", "role", "damaged"])
def test_convert_when_input_is_bad_exits_2_and_writes_nothing(
    case: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Arrange
    target, more, expected = tmp_path / "out", [], ""
    source = finished / "checkpoints" / "step-000002"
    if case == "no folder":
        source, expected = tmp_path / "nowhere", "nowhere: there is no such folder"
    elif case == "empty":
        source = tmp_path / "empty"
        source.mkdir()
        expected = "empty: holds neither a model"
    elif case == "same format":
        more, expected = ["--to", "dcp"], "is in the format dcp already"
    elif case == "target":
        target.mkdir()
        (target / "file").touch()
        expected = "out: exists already"
    elif case == "no run":
        (source / "actor").rename(tmp_path / "lost")
        source, expected = tmp_path / "lost", "--model"
    elif case == "role":
        more, expected = ["--role", "critic"], "holds no 'critic'; it has actor"
    else:
        data = next((source / "actor").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:1000])
        expected = "cannot read the checkpoint"

    # Act
    code = areal(["convert", str(source), str(target), *more])

    # Assert
    assert code == 2
    assert expected in capsys.readouterr().err
    assert not target.exists() or case == "target"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp")]


def test_convert_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["convert", "--help"]) == 0

    assert "areal convert runs/quickstart/grpo model-out" in capsys.readouterr().out
