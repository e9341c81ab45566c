from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_core.cli.main import run as areal
from areal_core.plugins.discovery import EntryPoint
from areal_core.plugins.manager import PluginManager
from areal_core.runs import diagnosis

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


@pytest.fixture(autouse=True)
def _plenty_of_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, 100 * GIB))


def checks(root: Path, **manager: object) -> dict[str, diagnosis.Check]:
    return {check.name: check for check in diagnosis.diagnose(root, **manager)}  # type: ignore[arg-type]


def test_doctor_when_all_is_well_then_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = areal(["doctor", "--root", str(tmp_path / "runs"), "--json"])

    result = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in result["checks"]}
    assert code == 0 and result["ok"] is True
    assert found["python"]["status"] == found["torch"]["status"] == found["runs folder"]["status"] == "ok"
    assert "not there yet" in found["runs folder"]["detail"]
    assert not (tmp_path / "runs").exists()


def test_doctor_when_something_is_broken_then_exit_1_and_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    assert areal(["doctor", "--root", str(tmp_path / "file" / "runs")]) == 1

    output = capsys.readouterr()
    assert any(line.split()[:3] == ["error", "runs", "folder"] for line in output.out.splitlines())
    assert "Set run.root" in output.out and "1 check failed" in output.err


def test_diagnose_when_a_plugin_is_broken_then_its_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_doctor_plugin.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_point = EntryPoint(name="bad", module="broken_doctor_plugin", distribution="areal-bad", version="1.0")

    found = checks(tmp_path, manager=PluginManager([entry_point]))

    assert found["plugin areal-bad"].status == "error"
    assert "no_such_module_anywhere" in found["plugin areal-bad"].detail
    assert found["plugins"].status == "error"


@pytest.mark.parametrize(("free", "status"), [(0.5, "error"), (5, "warning"), (50, "ok")])
def test_diagnose_when_disk_is_low_then_it_warns_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, int(free * GIB)))

    disk = checks(tmp_path)["disk"]

    assert disk.status == status and bool(disk.fix) == (status != "ok")


def test_diagnose_when_a_package_cannot_be_imported_then_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)

    found = checks(tmp_path)

    assert found["safetensors"].status == "error" and "pip install" in found["safetensors"].fix
    assert found["numpy"].status == "ok" and "disk" in found


def test_diagnose_when_a_gpu_is_there_then_its_memory_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        mem_get_info=lambda index: (60 * GIB, 80 * GIB),
        get_device_name=lambda index: "Accelerator",
    )
    torch = SimpleNamespace(cuda=cuda, __version__="9.9")
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]

    found = checks(tmp_path)

    assert found["gpu 0"].detail == "Accelerator, 60 of 80 GiB free"


def test_diagnose_when_a_check_itself_fails_then_that_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(shutil, "disk_usage", fail)

    assert checks(tmp_path)["runs"].detail == "PermissionError: no"


def test_doctor_when_a_configuration_is_given_then_its_engine_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from areal_core.api.configs import InferenceEngineConfig
    from areal_local.engine import LocalEngine

    def diagnose(config: InferenceEngineConfig) -> list[diagnosis.Check]:
        return [diagnosis.Check(name="engine", status="warning", detail=f"for {config.backend}")]

    monkeypatch.setattr(LocalEngine, "diagnose", diagnose)
    run = tmp_path / "run.yaml"
    run.write_text("trainer: rl\nactor: {path: m}\ntrain_dataset: {name: gsm8k}\nreward: {name: gsm8k}\n")

    code = areal(["doctor", str(run), "rollout.backend=local", "--root", str(tmp_path), "--json"])

    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert code == 0 and found["engine"]["detail"] == "for local"


def test_doctor_when_the_configuration_is_wrong_then_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["doctor", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
