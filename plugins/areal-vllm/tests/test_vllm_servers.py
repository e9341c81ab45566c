"""Starting and ending servers, with a program in place of vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.api.configs import InferenceEngineConfig
from areal_core.errors import ArealError, BadInputError
from areal_vllm import servers
from areal_vllm.config import VLLMConfig

PROGRAM = Path(__file__).with_name("server_program.py")


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., InferenceEngineConfig]:
    """``config(scenario, backend=..., **options)``: its servers write what they were given to ``record/``."""

    def make(
        scenario: str = "serves", backend: str = "vllm:d1", timeout: float = 60.0, **options: Any
    ) -> InferenceEngineConfig:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} {scenario} {tmp_path / "record"} "$@"\n')
        python.chmod(0o755)
        options.setdefault("python", str(python))
        return InferenceEngineConfig(
            backend=backend,
            dtype="float32",
            log_dir=tmp_path / "logs",
            setup_timeout=timeout,
            plugin_options={"vllm": VLLMConfig(**options)},
        )

    return make


@pytest.fixture
def launch(model: str) -> Iterator[Callable[..., servers.Launched]]:
    started: list[servers.Launched] = []

    def run(config: InferenceEngineConfig, **options: Any) -> servers.Launched:
        started.append(servers.launch(config, model, **options))
        return started[-1]

    yield run
    for launched in started:
        launched.stop()


def recorded(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((tmp_path / "record").glob("*.json"))]


def pids(tmp_path: Path) -> list[int]:
    return [pid for file in (tmp_path / "record").glob("*.pids") for pid in json.loads(file.read_text())]


def check_gone(processes: list[int], timeout: float = 30.0) -> None:
    alive = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=timeout)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_launch_when_there_are_two_replicas_of_two(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    options = {"args": {"max_num_seqs": 8, "enforce-eager": False, "override-generation-config": {"top_k": 3}}}

    launched = launch(config(backend="vllm:d2t2", env={"A_VARIABLE": "7"}, **options))

    assert len(set(launched.addresses)) == 2
    assert [launched.why_dead(address) for address in launched.addresses] == [None, None]
    for address, server in zip(sorted(launched.addresses), recorded(tmp_path), strict=True):
        arguments, environment = server["arguments"], server["environment"]
        assert address == f"127.0.0.1:{arguments[arguments.index('--port') + 1]}"
        flags = " ".join(arguments)
        for part in (
            "--tensor-parallel-size 2",
            "--dtype float32",
            "--max-num-seqs 8",
            "--no-enforce-eager",
            '--override-generation-config {"top_k": 3}',
            "--skip-tokenizer-init",
            '--weight-transfer-config {"backend": "gloo"}',
        ):
            assert part in flags
        assert environment["A_VARIABLE"] == "7"
        assert environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert "areal_vllm/worker" in environment["PYTHONPATH"]
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["vllm-0.log", "vllm-1.log"]


def test_launch_when_arguments_are_given_twice_takes_the_later(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    launch(config(args={"dtype": "bfloat16", "seed": 1}, max_lora_rank=20), server_args={"seed": 2})

    flags = " ".join(recorded(tmp_path)[0]["arguments"])
    assert "--dtype bfloat16" in flags and "float32" not in flags
    assert "--seed 2" in flags and "--seed 1" not in flags
    assert "--enable-lora --max-lora-rank 32" in flags


def test_launch_when_the_user_sets_the_import_path_keeps_that_of_the_worker(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    launch(config(env={"PYTHONPATH": "/mine"}))

    ours, *others = recorded(tmp_path)[0]["environment"]["PYTHONPATH"].split(os.pathsep)
    assert ours.endswith("areal_vllm/worker") and others == ["/mine"]


def test_launch_when_the_launcher_set_variables_for_its_ranks(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    launch(config())

    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"} & recorded(tmp_path)[0]["environment"].keys()


def test_stop_ends_every_process_and_may_be_called_twice(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    launched = launch(config(backend="vllm:d2"))
    processes = pids(tmp_path)
    assert len(processes) == 4

    launched.stop()
    launched.stop()

    check_gone(processes)


def test_stop_when_another_process_has_inherited_the_pipe(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launched = launch(config())
    pipe = launched.servers[0].guard.stdin
    assert pipe is not None
    # As a forked worker of a data loader has it: closing our end does not tell the guard.
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=(pipe.fileno(),))
    processes = pids(tmp_path)
    try:
        launched.stop()

        check_gone(processes, timeout=5.0)
        assert "does not stop" not in caplog.text
    finally:
        heir.kill()
        heir.wait()


def test_stop_when_the_guard_hangs_leaves_nothing(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_STOP_SECONDS", 0.5)
    launched = launch(config())
    processes = pids(tmp_path)
    os.kill(launched.servers[0].guard.pid, signal.SIGSTOP)

    launched.stop()

    check_gone(processes, timeout=5.0)


def test_launch_when_the_servers_want_a_key(
    config: Callable[..., Any], launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k-17")

    launched = launch(config())

    assert launched.why_dead(launched.addresses[0]) is None


def test_launch_when_the_host_is_ipv6(config: Callable[..., Any], launch: Callable[..., Any]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")

    launched = launch(config(host="::1"))

    # As in a URL.
    assert re.fullmatch(r"\[::1\]:\d+", launched.addresses[0])


def test_why_dead_when_a_server_was_killed(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    launched = launch(config())
    server, worker = pids(tmp_path)

    os.kill(server, signal.SIGKILL)

    # What it had started goes too.
    check_gone([server, worker])
    launched.servers[0].guard.wait(30)
    assert "was ended by signal 9" in launched.why_dead(launched.addresses[0])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_when_their_parent_dies(config: Callable[..., Any], model: str, tmp_path: Path, how: int) -> None:
    program = (
        "import sys, time\n"
        "from areal_core.api.configs import InferenceEngineConfig\n"
        "from areal_vllm import servers\n"
        "from areal_vllm.config import VLLMConfig\n"
        "options = {'vllm': VLLMConfig(python=sys.argv[1])}\n"
        "config = InferenceEngineConfig(backend='vllm:d1', dtype='float32', plugin_options=options)\n"
        "launched = servers.launch(config, sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", program, config().options.python, model]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        processes = pids(tmp_path)
        assert len(processes) == 2

        parent.send_signal(how)

        check_gone(processes)


@pytest.mark.parametrize(
    ("scenario", "kind", "reason"),
    [
        ("fails", ArealError, r"exited with code 1.*vllm-0.log.*OSError: no weights in the folder"),
        ("wrong_flag", BadInputError, r"exited with code 2.*unrecognized arguments: --no-such-flag"),
        ("no_vllm", BadInputError, r"vLLM is not installed there.*rollout.vllm.python"),
        ("never_ready", ArealError, r"not ready after 3 s \(rollout.setup_timeout\).*loading a very large model"),
        ("dies_at_first_request", ArealError, r"failed at its first request.*ValueError: unsupported head size 16"),
    ],
)
def test_launch_when_a_server_does_not_start(
    config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path, scenario: str, kind: type, reason: str
) -> None:
    timeout = 3.0 if scenario == "never_ready" else 60.0
    others = psutil.Process().children(recursive=True)  # of tests that share this process

    with pytest.raises(kind, match=f"(?s){reason}"):
        launch(config(scenario, timeout=timeout))

    check_gone(pids(tmp_path))
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_launch_when_a_port_is_in_use(config: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(BadInputError, match=rf"rollout.vllm.port: cannot listen on 127.0.0.1:{port}"):
            launch(config(port=port))

    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("vllm:d1", {"args": {"port": 1}}, "--port is decided by rollout.vllm.port"),
        ("vllm:d1", {"args": {"data_parallel_size": 2}}, "decided by rollout.backend"),
        ("vllm:d1", {"python": "/no/such/python"}, "rollout.vllm.python: there is no program '/no/such/python'"),
        ("vllm:d1e2", {}, "rollout.backend: 'vllm:d1e2'"),
        ("vllm:d1", {"host": "192.0.2.77"}, "rollout.vllm.host: cannot listen on '192.0.2.77'"),
        ("vllm:d1", {"args": {"api_key": "k"}}, "--api-key is decided by the environment variable VLLM_API_KEY"),
        ("vllm:d1", {"env": {"VLLM_API_KEY": "k"}}, "rollout.vllm.env: set VLLM_API_KEY in the environment of the run"),
    ],
)
def test_launch_when_the_input_is_bad(
    config: Callable[..., Any], launch: Callable[..., Any], backend: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInputError, match=reason):
        launch(config(backend=backend, **options))


@pytest.mark.parametrize("path", ["/no/such/model", "./none", "a/b/c"])
def test_launch_when_there_is_no_model(config: Callable[..., Any], path: str) -> None:
    with pytest.raises(BadInputError, match=f"no model folder '{path}'"):
        servers.launch(config(), path)
