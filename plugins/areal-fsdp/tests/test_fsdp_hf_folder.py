"""Hugging Face folders, written file by file: equal to what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import fsdp_cases as cases
import pytest
import torch
from safetensors.torch import load_file

from areal_core.api.io_struct import SaveLoadMeta
from areal_fsdp import export, hf_folder
from areal_fsdp.config import FSDPConfig

#: Plain; a buffer-free tied one; experts in one tensor that the files hold apart, and in one that they hold as it is.
ARCHES = ["qwen3", "qwen2", "qwen3_moe", "mixtral", "gpt_oss", "gpt2"]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("arch", ARCHES)
def test_save_hf_when_in_several_files_expected_tensors_as_transformers_writes_them(arch: str, tmp_path: Path) -> None:
    folder = cases.make_folder(arch, tmp_path / "model")
    engine = cases.make_engine(folder, options=FSDPConfig(max_shard_size="20KB"))

    engine.save(SaveLoadMeta(path=tmp_path / "out"))

    expected, found = tensors_of(folder), tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    for file in (tmp_path / "out").glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= 20_000


def test_save_hf_when_layout_needs_several_tensors_expected_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cases.make_folder("qwen3_moe", tmp_path / "model")
    engine = cases.make_engine(folder)
    engine.save(SaveLoadMeta(path=tmp_path / "streamed"))
    monkeypatch.setattr(export, "streamed_layout", lambda model: None)

    engine.save(SaveLoadMeta(path=tmp_path / "whole"))

    expected, found = tensors_of(tmp_path / "streamed"), tensors_of(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("arch", ARCHES)
def test_write_hf_folder_when_in_several_files_expected_one_file_and_one_tensor_in_memory(
    arch: str, tmp_path: Path
) -> None:
    engine = cases.make_engine(cases.make_folder(arch, tmp_path / "model"))
    live = cases.LiveBytes()
    # Copies, so that what is counted is what is held.
    tensors = ((name, live.add(value.clone())) for name, value in export.hf_tensors(engine.model))

    hf_folder.write_hf_folder(
        engine.model, tensors, tmp_path / "out", tokenizer=None, max_shard_size="20KB", source=engine.folder
    )

    assert live.now == 0
    assert live.largest < live.peak <= 20_000 + live.largest
