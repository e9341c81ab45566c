"""What a run ran on: versions, machine, command line and git commit. Holds no secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

#: The only environment variables that are recorded: those that change what or how fast a run computes.
ENVIRONMENT_VARIABLES = (
    "AREAL_PLUGINS",
    "AREAL_DISABLE_PLUGINS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
)
_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "datasets", "peft", "triton")
_SECRET = re.compile(r"(token|secret|password|passwd|api[_-]?key|credential)s?$", re.IGNORECASE)
#: Keys of the framework that only look like a secret.
_NOT_SECRET = re.compile(r"(max|min|stop|eos|pad|num|new)\w*tokens?$", re.IGNORECASE)


def redact_command(arguments: list[str]) -> list[str]:
    """The arguments, with values of options that look like secrets replaced by ``***``."""
    result: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        last = name.lstrip("-").rpartition(".")[2]
        secret = bool(_SECRET.search(last)) and not _NOT_SECRET.search(last)
        if hide_next and not argument.startswith("-"):
            result.append("***")
        elif secret and equals:
            result.append(f"{name}=***")
        else:
            result.append(argument)
        hide_next = secret and not equals and argument.startswith("--")
    return result


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the working tree that ``folder`` is in, and whether it has changes; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def package_versions() -> dict[str, str]:
    """Versions of the libraries that matter, and of every distribution that brings a plugin."""
    names = set(_PACKAGES)
    for entry_point in importlib.metadata.entry_points(group="areal"):
        if entry_point.dist is not None:
            names.add(entry_point.dist.name)
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def devices() -> list[str]:
    """Names of the GPUs, if torch is loaded already; it is not loaded for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def describe_environment() -> dict[str, Any]:
    """What ``environment.json`` holds."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redact_command(list(sys.argv)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": devices(),
        "versions": package_versions(),
        "git": git_state(Path.cwd()),
        "environment": {k: os.environ[k] for k in ENVIRONMENT_VARIABLES if k in os.environ},
    }
