"""What can go wrong with a training state on disk: full disks, background writes, foreign metadata."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from areal_core.api.configs import LoRAConfig, OptimizerConfig
from areal_core.api.io_struct import SaveLoadMeta
from areal_core.errors import ArealError, BadInputError
from areal_fsdp import hf_folder
from areal_fsdp.dcp_reader import SafeReader, read_metadata
from areal_fsdp.save_process import SaveProcess

ADAMW = OptimizerConfig(lr=1e-2)


def dcp_meta(path: Path, **fields: Any) -> SaveLoadMeta:
    return SaveLoadMeta(path=path, weight_format="dcp", with_optim=True, **fields)


def step(engine: Any, seed: int) -> None:
    engine.train_batch(cases.ragged_batch(seed), cases.policy_loss, cases.token_weight)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of tensors of every checkpoint is /dev/full, where the kernel says that no space is left."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    check_empty = hf_folder.check_empty

    def plant(path: Path) -> None:
        check_empty(path)
        path.mkdir(parents=True)
        (path / "__0_0.distcp").symlink_to("/dev/full")

    monkeypatch.setattr(hf_folder, "check_empty", plant)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The process that writes gets nothing to do until the event is set."""
    event = threading.Event()
    plain = SaveProcess.write

    def write(self: Any, *arguments: Any) -> Any:
        assert event.wait(60)
        return plain(self, *arguments)

    monkeypatch.setattr(SaveProcess, "write", write)
    yield event
    event.set()


# ------------------------------------------------------------------------------------------------- in the background


def test_save_when_in_background_expected_state_of_the_call(tmp_path: Path, gate: threading.Event) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW)
    step(engine, 0)
    expected = cases.parameters_of(engine)
    moments = {n: engine.optimizer.state[p]["exp_avg"].clone() for n, p in engine.model.named_parameters()}
    draw = torch.get_rng_state()

    engine.save(dcp_meta(tmp_path / "dcp", background=True))
    assert engine.is_saving
    step(engine, 1)  # trains on while nothing is written yet
    assert any(not torch.equal(expected[k], v) for k, v in cases.parameters_of(engine).items())
    torch.rand(3)
    gate.set()
    engine.finish_saving()

    assert not engine.is_saving
    other = cases.make_engine(folder, optimizer=ADAMW)
    other.load(dcp_meta(tmp_path / "dcp"))
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())
    for name, parameter in other.model.named_parameters():
        assert torch.equal(other.optimizer.state[parameter]["exp_avg"], moments[name])
    assert torch.equal(torch.get_rng_state(), draw)


def test_finish_saving_when_disk_is_full_expected_clear_error(tmp_path: Path, full_disk: None) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"), optimizer=ADAMW)

    engine.save(dcp_meta(tmp_path / "dcp", background=True))
    with pytest.raises(ArealError, match=r"dcp: cannot write the checkpoint \(OSError: .*No space left on device"):
        engine.finish_saving()

    engine.finish_saving()  # said once
    step(engine, 0)


@pytest.mark.parametrize("background", [False, True])
def test_save_when_finished_expected_reads_in_torch(background: bool, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))

    engine.save(SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", background=background))
    engine.finish_saving()

    name, parameter = next(iter(engine.model.named_parameters()))
    state = {f"model.{name}": torch.zeros_like(parameter)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state[f"model.{name}"], parameter)


# --------------------------------------------------------------------------------------------------------- full disk


def test_save_dcp_when_disk_is_full_expected_clear_error(tmp_path: Path, full_disk: None) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"), optimizer=ADAMW)

    with pytest.raises(ArealError, match=r"dcp: cannot write the checkpoint \(OSError: .*No space left on device"):
        engine.save(dcp_meta(tmp_path / "dcp"))


def test_save_hf_when_disk_is_full_expected_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    import safetensors.torch

    def save_file(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)

    with pytest.raises(ArealError, match=r"out: cannot write .*No space left on device"):
        engine.save(SaveLoadMeta(path=tmp_path / "out"))


# -------------------------------------------------------------------------------------------------- foreign metadata


class Attack:
    """Unpickles as a call of ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def saved(tmp_path: Path) -> tuple[Any, Path]:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    path = tmp_path / "dcp"
    engine.save(SaveLoadMeta(path=path, weight_format="dcp"))
    return engine, path


def write_metadata(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("place", ["whole file", "planner data", "an entry"])
def test_load_when_metadata_holds_code_expected_refused_and_not_run(place: str, tmp_path: Path) -> None:
    engine, path = saved(tmp_path)
    attack = Attack(tmp_path / "hacked")
    metadata = read_metadata(path)
    if place == "planner data":
        metadata.planner_data = attack
    elif place == "an entry":
        metadata.state_dict_metadata["model.extra"] = attack  # type: ignore[assignment]
    write_metadata(path, attack if place == "whole file" else metadata)
    before = cases.parameters_of(engine)

    with pytest.raises(
        BadInputError, match=r"\.metadata: cannot read the checkpoint.*mkdir, which describes no tensor"
    ):
        engine.load(SaveLoadMeta(path=path, weight_format="dcp"))

    assert not (tmp_path / "hacked").exists()
    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())
    # The file is an attack indeed: torch's own reader runs it.
    with pytest.raises(Exception):  # noqa: B017
        dcp.FileSystemReader(path).read_metadata().state_dict_metadata["no such entry"]
    assert (tmp_path / "hacked").exists()


def test_load_when_a_tensor_became_bytes_expected_refused(tmp_path: Path) -> None:
    # torch would unpickle the entry's data, without restriction.
    engine, path = saved(tmp_path)
    metadata = read_metadata(path)
    for name in [n for n in metadata.state_dict_metadata if n.startswith(("model.model.norm", "rng."))]:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
    write_metadata(path, metadata)

    with pytest.raises(BadInputError, match=r"tensor 'model.model.norm.weight' is missing"):
        engine.load(SaveLoadMeta(path=path, weight_format="dcp"))


def test_load_when_metadata_leaves_the_folder_expected_refused(tmp_path: Path) -> None:
    engine, path = saved(tmp_path)
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    write_metadata(path, metadata)

    with pytest.raises(BadInputError, match="outside the checkpoint"):
        engine.load(SaveLoadMeta(path=path, weight_format="dcp"))


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.serialization", "load"), ("pathlib", "Path")],
)
def test_read_metadata_when_other_class_is_named_expected_refused(module: str, name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())

    with pytest.raises(BadInputError, match=rf"asks for {module}\.{name}"):
        read_metadata(tmp_path)


def test_read_metadata_when_torch_wrote_it_expected_the_same(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4, dtype=torch.float64),
        "b": torch.zeros((), dtype=torch.bfloat16),
        "c": torch.zeros(2, dtype=torch.uint8),
    }
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)

    found = SafeReader(str(tmp_path)).read_metadata()

    expected = dcp.FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


def test_save_hf_when_written_expected_weights_readable_as_the_other_files(tmp_path: Path) -> None:
    lora = LoRAConfig(rank=2, target_modules=["q_proj"])
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"), lora=lora)

    engine.save(SaveLoadMeta(path=tmp_path / "hf"))
    engine.save_adapter(tmp_path / "adapter")

    written = [*(tmp_path / "hf").iterdir(), *(tmp_path / "adapter").iterdir()]
    assert sum(path.suffix == ".safetensors" for path in written) == 2
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in written} == {(tmp_path / "plain").stat().st_mode}
