"""The command line and environment that one vLLM server is started with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import BadInputError

if TYPE_CHECKING:
    from areal_core.api.configs import InferenceEngineConfig
    from areal_vllm.config import VLLMConfig

#: The environment variable that names the key of servers that want one.
API_KEY = "VLLM_API_KEY"
#: Flags that a run decides by other keys.
_OWN_FLAGS = {
    # A command line is for everybody to read.
    "api-key": f"the environment variable {API_KEY}",
    "host": "rollout.vllm.host",
    "port": "rollout.vllm.port",
    "model": "actor.path",
    "data-parallel-size": "rollout.backend (vllm:dN starts N servers)",
}
_WORKER_FOLDER = Path(__file__).parent / "worker"
_WORKER_CLASS = "areal_vllm_worker.WorkerExtension"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
#: The ranks that vLLM takes for --max-lora-rank.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def server_command(
    config: InferenceEngineConfig,
    options: VLLMConfig,
    model_path: str,
    port: int,
    *,
    on_gpu: bool,
    extra: Mapping[str, Any] | None = None,
) -> list[str]:
    """The command of one server. The user's flags (``rollout.vllm.args``, then ``extra``) replace ours.

    Raises:
        BadInputError: for a flag that another key decides.
    """
    parallel = config.parsed_backend.parallel
    flags: dict[str, Any] = {
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        # What a truncating sampler kept is told by the log-probs of the top_k likeliest tokens.
        "max-logprobs": -1,
        "enable-scale-out": True,
        "worker-extension-cls": _WORKER_CLASS,
        "weight-transfer-config": {"backend": "nccl" if on_gpu else "gloo"},
    }
    if config.dtype is not None:
        flags["dtype"] = config.dtype
    if parallel.tensor > 1:
        flags["tensor-parallel-size"] = parallel.tensor
    if parallel.pipeline > 1:
        flags["pipeline-parallel-size"] = parallel.pipeline
    if config.trust_remote_code:
        flags["trust-remote-code"] = True
    if options.max_lora_rank is not None:
        rank = next((rank for rank in _LORA_RANKS if rank >= options.max_lora_rank), options.max_lora_rank)
        flags.update({"enable-lora": True, "max-lora-rank": rank, "max-loras": 1})
    folder = Path(model_path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        flags["skip-tokenizer-init"] = True
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        # A model that starts random: the trainer sends its weights before the first request.
        flags["load-format"] = "dummy"
    if not on_gpu:
        # Compiling takes longer than it saves on a CPU.
        flags["enforce-eager"] = True
    for key, value in {**options.args, **(extra or {})}.items():
        name = str(key).lstrip("-").replace("_", "-")
        if name in _OWN_FLAGS:
            raise BadInputError(f"rollout.vllm.args: --{name} is decided by {_OWN_FLAGS[name]}. Leave it out.")
        flags[name] = value
    command = [options.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", options.host, "--port", str(port), "--model", model_path]
    for name, value in flags.items():
        command += _flag(name, value)
    return command


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(dict(value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def server_environment(
    config: InferenceEngineConfig, options: VLLMConfig, index: int, *, on_gpu: bool, devices: Sequence[str]
) -> dict[str, str]:
    """The environment of replica ``index``, which has GPUs of its own, or a share of the cores."""
    parallel = config.parsed_backend.parallel
    size = parallel.tensor * parallel.pipeline
    # What the trainer's launcher set for its own ranks would mislead vLLM's.
    launcher = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(launcher) and key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    }
    environment.update(
        VLLM_SERVER_DEV_MODE="1",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_NO_USAGE_STATS="1",
        PYTHONUNBUFFERED="1",
    )
    if on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index * size : (index + 1) * size])
    else:
        environment["TORCHDYNAMO_DISABLE"] = "1"
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Not bound to cores, which the trainer and other servers of this machine want too; a share of them in number.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment["OMP_NUM_THREADS"] = str(max(1, _cores() // (parallel.data * size)))
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    environment.update({key: value for key, value in options.env.items() if key != "CUDA_VISIBLE_DEVICES"})
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{_WORKER_FOLDER}{os.pathsep}{path}" if path else str(_WORKER_FOLDER)
    return environment


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_devices(config: InferenceEngineConfig, options: VLLMConfig) -> list[str]:
    """The GPUs of all servers, as CUDA_VISIBLE_DEVICES names them; empty without a GPU.

    Those of ``rollout.vllm.env.CUDA_VISIBLE_DEVICES``, else those after the trainer's local ranks.

    Raises:
        BadInputError: if they are too few.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    needed = config.parsed_backend.parallel.world_size
    given = options.env.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        devices, source = given.split(","), "rollout.vllm.env.CUDA_VISIBLE_DEVICES names"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        everything = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        devices, source = everything[trainers:], f"beside the {trainers} of the trainer this machine has"
    if len(devices) < needed:
        raise BadInputError(
            f"rollout.backend: {config.backend} needs {needed} GPUs for its servers, but {source} {len(devices)}. "
            "Start fewer, or name the devices in rollout.vllm.env.CUDA_VISIBLE_DEVICES (they may be shared with the "
            "trainer if gpu-memory-utilization in rollout.vllm.args leaves it room)."
        )
    return devices[:needed]
