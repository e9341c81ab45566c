"""The generation process: a ``ModelHost`` that is driven over a socket."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_local.config import LocalConfig
from areal_local.generation import Done
from areal_local.host import ModelHost, load_model
from areal_local.rows import Pending
from areal_local.shared_weights import SharedWeights
from areal_local.wire import Arrays, FrameReader, error_to_plain, frame, pack_answers, unpack_requests

_logger = getLogger("LocalProcess")


class Server:
    """Reads frames in the main thread; answers come from there and from the generation thread."""

    def __init__(self, sock: socket.socket, segment: int) -> None:
        self.sock, self.segment = sock, segment
        self._frames = FrameReader()
        self._read: list[tuple[dict[str, Any], Arrays]] = []
        self._sending = threading.Lock()
        self._requests: dict[int, Pending] = {}
        self._tokenizers: dict[int, Any] = {}

    def send(self, data: bytes) -> None:
        with self._sending:
            self.sock.sendall(data)

    def receive(self) -> tuple[dict[str, Any], Arrays]:
        while not self._read:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError
            self._read = self._frames.feed(data)
        return self._read.pop(0)

    def serve(self) -> None:
        """Load the model that the first frame names, then do what the others say, until one says stop."""
        setup, _ = self.receive()
        _send_logs(self, setup["log_level"])
        try:
            self._load(setup)
        except Exception as error:
            if not isinstance(error, BadInputError):
                _logger.exception("the generation process cannot start")
            self.send(frame({"op": "failed", "error": error_to_plain(error)}))
            return
        facts, weights = self.host.facts, self.host.weights.table.to_plain()
        self.send(
            frame(
                {
                    "op": "ready",
                    "context": facts.context,
                    "vocab_size": facts.vocab_size,
                    "eos_ids": facts.eos_ids,
                    "weights": weights,
                    "dtypes": self._dtypes,
                }
            )
        )
        while self.handle(*self.receive()):
            pass

    def _load(self, setup: dict[str, Any]) -> None:
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(setup["num_threads"])
        torch.set_float32_matmul_precision(setup["matmul_precision"])
        torch.use_deterministic_algorithms(setup["deterministic"])
        self._trust_remote_code = setup["trust_remote_code"]
        options = LocalConfig(**setup["options"])
        model = load_model(
            setup["path"],
            dtype=setup["dtype"],
            device=torch.device(setup["device"]),
            trust_remote_code=self._trust_remote_code,
            model_spec=options.model_spec,
        )
        self.host = ModelHost(model, options, keep_kv=setup["keep_kv"], deliver=self.deliver)
        if setup["paused"]:
            self.host.pause()
        self._dtypes = [str(dtype).removeprefix("torch.") for dtype in self.host.weights.dtypes]
        self._shared = SharedWeights(self.segment, self.host.weights.table.shapes, self._dtypes)
        gc.collect()
        gc.freeze()

    # ------------------------------------------------------------------------------------------------------ frames

    def handle(self, header: dict[str, Any], arrays: Arrays) -> bool:
        """Do what a frame says; False after ``stop``."""
        operation = header["op"]
        if operation == "submit":
            self.submit(header, arrays)
        elif operation == "cancel":
            for number in arrays["number"].tolist():
                pending = self._requests.pop(number, None)
                if pending is not None:
                    self.host.cancel(pending)
        else:
            self._obey(operation, header)
        return operation != "stop"

    def _obey(self, operation: str, header: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"op": "reply", "call": header.get("call")}
        try:
            if self.host.error is not None and operation not in ("stop", "counters", "version"):
                raise self.host.error
            reply["result"] = getattr(self, f"do_{operation}")(header)
        except Exception as error:
            if reply["call"] is None:
                raise  # nobody would hear of it
            reply["error"] = error_to_plain(error)
        if reply["call"] is not None:
            self.send(frame(reply))

    def submit(self, header: dict[str, Any], arrays: Arrays) -> None:
        good = []
        for pending in unpack_requests(header, arrays, self._tokenizers):
            if isinstance(pending.tokenizer, Exception):
                self.deliver([(pending, pending.tokenizer)])
            else:
                self._requests[pending.number] = pending
                good.append(pending)
        try:
            self.host.loop.submit_all(good)
        except Exception as error:  # what ended the loop
            self.deliver([(pending, error) for pending in good])

    def deliver(self, done: list[Done]) -> None:
        for pending, _ in done:
            self._requests.pop(pending.number, None)
        self.send(pack_answers(done))

    # -------------------------------------------------------------------------------------------------- operations

    def do_tokenizer(self, header: dict[str, Any]) -> None:
        tokenizer: Any
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                header["folder"], trust_remote_code=self._trust_remote_code
            )
        except Exception as error:
            tokenizer = BadInputError(f"gconfig.stop: the generation process cannot load the tokenizer: {error}")
        finally:
            shutil.rmtree(header["folder"], ignore_errors=True)
        self._tokenizers[header["number"]] = tokenizer

    def do_pause(self, header: dict[str, Any]) -> None:
        self.host.pause()

    def do_resume(self, header: dict[str, Any]) -> None:
        self.host.resume()

    def do_version(self, header: dict[str, Any]) -> None:
        self.host.set_version(header["version"])

    def do_update_shared(self, header: dict[str, Any]) -> None:
        tensors = self._shared.tensors
        self.host.swap({index: tensors[index] for index in header["given"]}, header["version"])

    def do_update_disk(self, header: dict[str, Any]) -> None:
        self.host.update_from_disk(Path(header["folder"]), header["version"])

    def do_offload(self, header: dict[str, Any]) -> None:
        self.host.offload()

    def do_onload(self, header: dict[str, Any]) -> None:
        self.host.onload()

    def do_counters(self, header: dict[str, Any]) -> dict[str, float]:
        return self.host.counters()

    def do_stop(self, header: dict[str, Any]) -> None:
        self.host.stop()


class _LogHandler(logging.Handler):
    """Sends log records to the parent, which has the handlers."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        header = {"op": "log", "name": record.name, "level": record.levelno, "text": text}
        with contextlib.suppress(OSError):
            self.server.send(frame(header))


def _send_logs(server: Server, level: int) -> None:
    areal = logging.getLogger("areal")
    areal.addHandler(_LogHandler(server))
    areal.setLevel(level)
    areal.propagate = False
