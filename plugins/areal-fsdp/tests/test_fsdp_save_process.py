"""The process that writes checkpoints: how it ends, what it leaves, and what is said when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from fsdp_save_cases import request_of, with_hook

from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import SaveLoadMeta
from areal_core.errors import ArealError
from areal_fsdp import save_process
from areal_fsdp.save_process import SaveProcess, shared_save_process
from areal_fsdp.staging import SharedCopy

ADAMW = OptimizerConfig(lr=1e-2)


def dcp_meta(path: Path) -> SaveLoadMeta:
    return SaveLoadMeta(path=path, weight_format="dcp", with_optim=True, background=True)


def step(engine: Any, seed: int) -> None:
    engine.train_batch(cases.ragged_batch(seed), cases.policy_loss, cases.token_weight)


def is_running(pid: int) -> bool:
    """Not a zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def killed_in_mid_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Children die so until the fixture is called."""
    program = save_process._PROGRAM
    monkeypatch.setattr(save_process, "_shared", None)
    monkeypatch.setattr(save_process, "_PROGRAM", with_hook("os.kill(os.getpid(), signal.SIGKILL)"))
    return lambda: monkeypatch.setattr(save_process, "_PROGRAM", program)


def test_finish_saving_when_process_is_killed_in_mid_write_expected_error_and_checkpoint_before_it(
    killed_in_mid_write: Callable[[], None], tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW)
    engine.save(SaveLoadMeta(path=tmp_path / "first", weight_format="dcp", with_optim=True))
    expected = cases.parameters_of(engine)
    step(engine, 0)

    engine.save(dcp_meta(tmp_path / "second"))
    with pytest.raises(ArealError, match=r"second: cannot write the checkpoint \(the process \d+ .* ended by SIGKILL"):
        engine.finish_saving()

    written = tmp_path / "second" / "__0_0.distcp"
    assert written.stat().st_size > 0 and not (tmp_path / "second" / ".metadata").exists()
    # Training goes on; another process writes the next one.
    killed_in_mid_write()
    step(engine, 1)
    engine.save(dcp_meta(tmp_path / "third"))
    engine.finish_saving()
    other = cases.make_engine(folder, optimizer=ADAMW)
    for name, weights in (("third", cases.parameters_of(engine)), ("first", expected)):
        other.load(dcp_meta(tmp_path / name))
        assert all(torch.equal(weights[k], v) for k, v in cases.parameters_of(other).items())


def test_save_when_another_is_under_way_expected_both_complete(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=ADAMW)
    expected = {}

    for name in ("first", "second"):
        step(engine, len(expected))
        expected[name] = cases.parameters_of(engine)
        engine.save(dcp_meta(tmp_path / name))
    engine.finish_saving()

    other = cases.make_engine(folder, optimizer=ADAMW)
    for name, weights in expected.items():
        other.load(dcp_meta(tmp_path / name))
        assert all(torch.equal(weights[k], v) for k, v in cases.parameters_of(other).items())


@pytest.fixture(scope="module")
def shared_copy() -> SharedCopy:
    return SharedCopy({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(True)})


@pytest.fixture(scope="module")
def process() -> Iterator[SaveProcess]:
    process = SaveProcess()
    yield process
    process.close()


def test_write_when_called_again_expected_the_same_process(
    process: SaveProcess, shared_copy: SharedCopy, tmp_path: Path
) -> None:
    written = process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)
    pid = process.pid

    process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)

    assert process.pid == pid
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert sorted(number for number, *_ in written) == [0, 1, 2]
    for number, file, start, length in written:
        assert file == "__0_0.distcp"
        part = tmp_path / f"{number}.pt"
        part.write_bytes(data[start : start + length])
        expected = list(shared_copy.tensors.values())[number]
        assert torch.equal(torch.load(part, weights_only=True), expected)


def test_write_when_process_died_while_idle_expected_another_one(
    process: SaveProcess, shared_copy: SharedCopy, tmp_path: Path
) -> None:
    process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)

    process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)

    assert process.pid != first and not is_running(first)


def test_write_when_folder_is_gone_expected_error_of_the_disk_and_process_goes_on(
    process: SaveProcess, shared_copy: SharedCopy, tmp_path: Path
) -> None:
    process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)
    pid = process.pid

    with pytest.raises(FileNotFoundError, match="nowhere"):
        process.write(request_of(tmp_path / "nowhere", shared_copy), shared_copy.descriptor)
    process.write(request_of(tmp_path, shared_copy), shared_copy.descriptor)

    assert process.pid == pid


def test_write_when_process_cannot_start_expected_what_it_said(
    monkeypatch: pytest.MonkeyPatch, shared_copy: SharedCopy, tmp_path: Path
) -> None:
    monkeypatch.setattr(save_process, "_PROGRAM", "raise SystemExit('no such module')")

    with pytest.raises(ArealError, match="ended with exit code 1; the last it said: no such module"):
        SaveProcess().write(request_of(tmp_path, shared_copy), shared_copy.descriptor)


def test_shared_save_process_when_nobody_holds_it_expected_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_process, "_shared", None)

    def start_and_forget() -> int:
        process = shared_save_process()
        again = shared_save_process()
        assert again is process
        process._start()
        assert process.pid is not None and is_running(process.pid)
        return process.pid

    pid = start_and_forget()

    assert not is_running(pid)
    assert shared_save_process().pid is None


def test_save_when_finished_expected_shared_memory_given_back(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"), optimizer=ADAMW)

    def segments() -> int:
        opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        mapped = Path("/proc/self/maps").read_text().splitlines()
        return sum("areal-checkpoint" in line for line in [*opened, *mapped])

    before = segments()  # of this module's fixture
    engine.save(dcp_meta(tmp_path / "dcp"))
    engine.finish_saving()

    # The thread that wrote it lets go of its last reference a moment after it has said that it is done.
    end = time.monotonic() + 60
    while segments() > before and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert segments() == before


#: A trainer with a save under way: says its child, and waits for a line of input within the child's write.
_TRAINER = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
sys.path[:0] = {path!r}
import fsdp_save_cases
from areal_fsdp import save_process
from areal_fsdp.staging import SharedCopy
import torch
from pathlib import Path

folder = Path(sys.argv[1])
save_process._PROGRAM = fsdp_save_cases.with_hook("print(os.getpid(), file=open({pipe!r}, 'w')); open({gate!r}).read()")
copy = SharedCopy({{name: torch.ones(4) for name in "abcd"}})
process = save_process.SaveProcess()
writing = threading.Thread(target=process.write, args=(fsdp_save_cases.request_of(folder, copy), copy.descriptor))
writing.start()
try:
    writing.join()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    writing.join()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT"])
def test_process_when_trainer_ends_in_mid_write_expected_nothing_left(end: str, tmp_path: Path) -> None:
    # Arrange: the child says that it is in the middle of its file, and goes on when the gate is opened.
    pipe, gate = tmp_path / "pipe", tmp_path / "gate"
    os.mkfifo(pipe), os.mkfifo(gate)
    program = _TRAINER.format(path=[str(Path(__file__).parent)], pipe=str(pipe), gate=str(gate))
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], process_group=0, stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(pipe.read_text())
        assert is_running(child)
        file = tmp_path / "__0_0.distcp"
        partial = file.stat().st_size

        # Act: as Ctrl-C, to the whole group.
        os.killpg(trainer.pid, getattr(signal, end))
        if end == "SIGINT":
            assert trainer.stdout is not None and trainer.stdout.readline() == "interrupted\n"
            gate.write_text("")  # the child is there to read it, and finishes
        trainer.wait(60)

        # Assert: a pidfd is readable when its process has ended.
        try:
            descriptor = os.pidfd_open(child)
        except ProcessLookupError:
            pass
        else:
            import select

            assert select.select([descriptor], [], [], 60)[0]
            os.close(descriptor)
        assert not is_running(child)
        assert (file.stat().st_size > partial) == (end == "SIGINT")
        assert trainer.returncode == {"SIGINT": 0, "SIGKILL": -signal.SIGKILL}[end]
    finally:
        trainer.kill()
        trainer.wait()
