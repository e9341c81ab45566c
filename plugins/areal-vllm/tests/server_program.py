"""Stands in for the interpreter that runs vLLM: ``server_program.py SCENARIO -m vllm... --port P ...``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if scenario == "dies_at_first_request":
            sys.stderr.write(
                "(EngineCore pid=1) ERROR 11-30 07:00:00 [core.py:1] ValueError: unsupported head size 16\n"
            )
            sys.stderr.flush()
            os._exit(1)
        self._answer({"choices": [{"text": ""}]})

    def log_message(self, *args: object) -> None:
        return

    def _answer(self, body: object) -> None:
        # As vLLM: /health is open, the rest is not.
        key = os.environ.get("VLLM_API_KEY")
        known = not key or self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}"
        data = json.dumps(body if known else {"error": "Unauthorized"}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


scenario, record = sys.argv[1], Path(sys.argv[2])
arguments = sys.argv[3:]
port = int(arguments[arguments.index("--port") + 1])
host = arguments[arguments.index("--host") + 1]


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


record.mkdir(exist_ok=True)
(record / f"{port}.json").write_text(json.dumps({"arguments": arguments, "environment": dict(os.environ)}))
if scenario == "fails":
    say("(EngineCore pid=1) ERROR 11-30 07:00:00 [core.py:1] OSError: no weights in the folder")
    say("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
if scenario == "wrong_flag":
    say("api_server.py: error: unrecognized arguments: --no-such-flag")
    sys.exit(2)
if scenario == "no_vllm":
    say("python: No module named vllm")
    sys.exit(1)
if scenario == "never_ready":
    say("loading a very large model")
    time.sleep(600)
# A worker in a session of its own that ignores being asked, as the worst of grandchildren would.
worker = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
(record / f"{port}.pids").write_text(json.dumps([os.getpid(), worker.pid]))
Server((host, port), Handler).serve_forever()
