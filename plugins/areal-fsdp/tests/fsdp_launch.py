"""Starts worker scripts on several ranks, as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def launch(processes: int, script: str, out: Path, arguments: list[str]) -> None:
    """Run ``script`` of this folder on ``processes`` ranks; fails with their output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    command = [sys.executable, str(HERE / script), *arguments]
    logs = [out / f"rank{rank}.log" for rank in range(processes)]
    workers = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as stream:
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                workers.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
        codes = [worker.wait(timeout=1700) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * processes, "\n".join(log.read_text()[-3000:] for log in logs)
