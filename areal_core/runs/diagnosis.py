"""What ``areal doctor`` looks at."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from areal_core.api.check_api import Check
from areal_core.plugins import PluginManager, get_plugin_manager
from areal_core.runs.files import temporary_beside

if TYPE_CHECKING:
    from areal_core.api.configs import BaseTrainerConfig, InferenceEngineConfig
    from areal_core.api.engine_api import InferenceEngine

_GIB = 2**30
_REQUIRED_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
#: Package or program -> what it is for.
_OPTIONAL_PACKAGES = {
    "datasets": "datasets from the hub",
    "peft": "LoRA",
    "tensorboard": "the tracker tensorboard",
}
_OPTIONAL_TOOLS = {"git": "the commit in environment.json", "torchrun": "training on several processes"}


def diagnose(root: Path, manager: PluginManager | None = None, config: BaseTrainerConfig | None = None) -> list[Check]:
    """Run every check. None of them raises: one that fails is an error of its own.

    Args:
        config: of a run, whose inference engine also looks at what it needs, such as servers.
    """
    manager = manager or get_plugin_manager()
    groups: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("gpu", _gpu),
        ("plugins", lambda: _plugins(manager)),
        ("machine", _machine),
        ("runs", lambda: _runs_root(root)),
        ("optional", _optional),
    ]
    rollout = getattr(config, "rollout", None)
    if rollout is not None:
        groups.append(("rollout", lambda: _inference_engine(rollout, manager)))
    checks: list[Check] = []
    for name, group in groups:
        try:
            checks += list(group())
        except Exception as error:
            checks.append(Check(name=name, status="error", detail=f"{type(error).__name__}: {error}"))
    return checks


def _python() -> Iterator[Check]:
    good = sys.version_info >= (3, 11)
    yield Check(
        name="python",
        status="ok" if good else "error",
        detail=f"{platform.python_version()} at {sys.executable}",
        fix="" if good else "Use Python 3.11 or newer.",
    )
    yield Check(name="areal-core", status="ok", detail=importlib.metadata.version("areal-core"))


def _packages() -> Iterator[Check]:
    for name in _REQUIRED_PACKAGES:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken native library raises all sorts
            yield Check(
                name=name,
                status="error",
                detail=f"cannot be imported: {type(error).__name__}: {str(error).strip().splitlines()[:1]}",
                fix=f"Reinstall it: pip install --force-reinstall {name}",
            )
        else:
            yield Check(name=name, status="ok", detail=str(getattr(module, "__version__", "unknown version")))


def _gpu() -> Iterator[Check]:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        reason = "this PyTorch is built without GPU support" if not built else "PyTorch finds none"
        driver = shutil.which("nvidia-smi") is not None
        yield Check(
            name="gpu",
            status="warning" if driver else "ok",
            detail=f"none: {reason}",
            fix="A driver is installed: install a PyTorch build that matches it." if driver else "",
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield Check(
            name=f"gpu {index}",
            status="ok",
            detail=f"{torch.cuda.get_device_name(index)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free",
        )


def _plugins(manager: PluginManager) -> Iterator[Check]:
    working = [plugin for plugin in manager.plugins if plugin.status == "ok"]
    yield Check(
        name="plugins",
        status="ok" if working else "error",
        detail=", ".join(dict.fromkeys(plugin.distribution for plugin in working)) or "none works",
        fix="" if working else "Not even the kernel's own plugin loads. Reinstall areal-core.",
    )
    for plugin in manager.plugins:
        label = f"plugin {plugin.distribution}"
        if plugin.status == "broken":
            yield Check(name=label, status="error", detail=str(plugin.reason), fix=f"areal plugins show {plugin.name}")
        elif plugin.status == "disabled":
            yield Check(name=label, status="ok", detail=f"disabled: {plugin.reason}")
        else:
            for entry in plugin.entries:
                if entry.problem:
                    yield Check(name=f"plugin {entry.full_name}", status="warning", detail=entry.problem)


def _machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = psutil.virtual_memory()
    yield Check(name="cpu", status="ok", detail=f"{cores} cores usable of {os.cpu_count()}, {platform.machine()}")
    low = memory.available < 2 * _GIB
    yield Check(
        name="memory",
        status="warning" if low else "ok",
        detail=f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available",
        fix="Close other programs: loading a model needs its weights' size twice." if low else "",
    )


def _runs_root(root: Path) -> Iterator[Check]:
    existing = root.absolute()
    while not existing.exists():
        existing = existing.parent
    problem = ""
    if not existing.is_dir():
        problem = f"{existing} is a file"
    else:
        probe = temporary_beside(existing / "doctor")
        try:
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            problem = f"cannot write into {existing}: {error.strerror or error}"
    missing = "" if root.exists() else " (not there yet; it will be made)"
    yield Check(
        name="runs folder",
        status="error" if problem else "ok",
        detail=problem or f"{root}{missing} is writable",
        fix="Set run.root to a folder that you can write to." if problem else "",
    )
    if problem:
        return
    usage = shutil.disk_usage(existing)
    status: Literal["ok", "warning", "error"] = "ok"
    if usage.free < 10 * _GIB:
        status = "error" if usage.free < _GIB else "warning"
    yield Check(
        name="disk",
        status=status,
        detail=f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.0f} GiB free at {existing}",
        fix="" if status == "ok" else "Free some space: a checkpoint takes about 12 bytes per parameter.",
    )


def _inference_engine(rollout: InferenceEngineConfig, manager: PluginManager) -> Iterator[Check]:
    engine: type[InferenceEngine] = manager.load(
        "areal_inference_engines", rollout.parsed_backend.name, key="rollout.backend"
    )
    yield from engine.diagnose(rollout)


def _optional() -> Iterator[Check]:
    for name, purpose in _OPTIONAL_PACKAGES.items():
        try:
            yield Check(name=name, status="ok", detail=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name=name, status="ok", detail=f"not installed; only needed for {purpose}")
    for name, purpose in _OPTIONAL_TOOLS.items():
        beside = Path(sys.executable).with_name(name)
        found = shutil.which(name) or (str(beside) if beside.exists() else None)
        yield Check(name=name, status="ok", detail=found or f"not found; only needed for {purpose}")
