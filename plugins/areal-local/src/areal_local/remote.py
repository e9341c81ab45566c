"""The engine's view of a model in another process: the same as of one in this process."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch

from areal_core.api.configs import InferenceEngineConfig
from areal_core.errors import ArealError
from areal_core.logging import getLogger
from areal_local.config import LocalConfig
from areal_local.host import ModelFacts
from areal_local.process import GenerationProcess, GenerationProcessError
from areal_local.rows import Pending
from areal_local.shared_weights import SharedWeights, create_segment
from areal_local.weights import WeightTable

_logger = getLogger("LocalProcess")

_SHARED = "update_shared"


class ProcessHost:
    """A ``ModelHost`` in a process of its own.

    Weights go through shared memory: written here, tensor by tensor, and copied there between two tokens. Where the
    process dies its requests fail, and another process takes its place with the newest weights, unless the one that
    died had never answered anything: the next one would end in the same way.

    Raises:
        BadInputError: if the model cannot be loaded.
        ArealError: if the process is not ready within ``config.setup_timeout``.
    """

    def __init__(self, path: str, config: InferenceEngineConfig, options: LocalConfig, device: torch.device) -> None:
        self._config = config
        self._setup = {
            "path": path,
            "dtype": config.dtype,
            "trust_remote_code": config.trust_remote_code,
            "keep_kv": config.weight_update_keep_kv,
            "options": attrs.asdict(options),
            "device": str(device),
            # What this process would compute with, so that the tokens are the same.
            "num_threads": options.num_threads or torch.get_num_threads(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "log_level": logging.getLogger("areal").getEffectiveLevel(),
        }
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._error: BaseException | None = None
        self._stopped = self._paused = False
        self._version = 0
        self._newest: tuple[str, dict[str, Any]] | None = ("", {})
        """The call that brings a new process to the newest weights; None while they cannot be had."""
        self._totals: Counter[str] = Counter()
        self._counted: dict[str, float] = {}
        self._segment = create_segment()
        try:
            self._process = self._spawn(paused=False)
            facts = self._wait_until_ready()
        except BaseException:
            os.close(self._segment)
            raise
        self.facts = ModelFacts(facts["context"], facts["vocab_size"], tuple(facts["eos_ids"]))
        self._table = WeightTable(**facts["weights"])
        self._shared = SharedWeights(self._segment, self._table.shapes, facts["dtypes"])

    @property
    def pid(self) -> int:
        return self._process.popen.pid

    @property
    def error(self) -> BaseException | None:
        return self._error

    def _spawn(self, *, paused: bool) -> GenerationProcess:
        return GenerationProcess({**self._setup, "paused": paused}, self._segment, self._ended)

    def _wait_until_ready(self) -> dict[str, Any]:
        limit = self._config.setup_timeout
        try:
            return self._process.ready.result(limit)
        except concurrent.futures.TimeoutError:
            self._process.stop()
            raise ArealError(
                f"the generation process was not ready after {limit:g} s (rollout.setup_timeout)"
            ) from None
        except BaseException:
            self._process.stop()
            raise

    def _ended(self, process: GenerationProcess) -> None:
        """A process is gone; called in its thread, before its requests fail."""
        with self._lock:
            if self._stopped or process.stopping:
                return
            if not process.answered or self._newest is None or not isinstance(process.error, GenerationProcessError):
                self._error = process.error
                return
            _logger.error("%s", process.error)
            _logger.warning("starting another generation process; the requests of the last one fail")
            self._totals.update(self._counted)
            self._totals["restarts"] += 1
            self._counted = {}
            try:
                self._process = self._spawn(paused=True)
            except OSError as error:
                self._error = ArealError(f"cannot start another generation process: {error}")
                return
            operation, fields = self._newest
            if operation:
                self._process.post(operation, **fields)
            self._process.post("version", version=self._version)
            if not self._paused:
                self._process.post("resume")

    def _current(self) -> GenerationProcess:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise ArealError("the engine was destroyed; no request can start")
            return self._process

    def _call(self, operation: str, **fields: Any) -> Any:
        while True:
            process = self._current()
            try:
                return process.call(operation, self._config.request_timeout, **fields)
            except GenerationProcessError:
                # Once more where another process has taken its place.
                if self._current() is process:
                    raise

    # -------------------------------------------------------------------------------------------------- generation

    def submit(self, pending: Pending) -> None:
        pending.number = next(self._numbers)
        while not self._current().submit(pending):
            pass

    def cancel(self, pending: Pending) -> None:
        self._process.cancel(pending)

    def pause(self) -> None:
        self._paused = True
        self._call("pause")

    def resume(self) -> None:
        self._paused = False
        self._call("resume")

    # ----------------------------------------------------------------------------------------------------- weights

    def set_version(self, version: int) -> None:
        with self._lock:
            self._version = version
            self._current().post("version", version=version)

    def update_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, source: str) -> None:
        self._current()
        with self._lock:
            # The segment is written to. Weights of a folder can be had again, even if these turn out to be wrong.
            if self._newest is not None and self._newest[0] == _SHARED:
                self._newest = None
        self._shared.allocate()
        views = self._shared.tensors
        given: list[int] = []
        with torch.no_grad():
            for name, tensor in tensors:
                index = self._table.find(name, tensor.shape, source)
                if index is not None:
                    views[index].copy_(tensor)
                    given.append(index)
        self._table.check_complete(given, source)
        self._update(_SHARED, {"given": given}, version)

    def update_from_disk(self, folder: Path, version: int) -> None:
        self._update("update_disk", {"folder": str(folder.absolute())}, version)

    def _update(self, operation: str, fields: dict[str, Any], version: int) -> None:
        self._call(operation, version=version, **fields)
        with self._lock:
            self._newest = (operation, {**fields, "version": version})
            self._version = version

    def offload(self) -> None:
        self._paused = True
        self._call("offload")

    def onload(self) -> None:
        self._paused = False
        self._call("onload")

    # --------------------------------------------------------------------------------------------------------- end

    def counters(self) -> dict[str, float]:
        counted = self._call("counters")
        with self._lock:
            gauges = {name: counted.pop(name) for name in ("running", "waiting")}
            self._counted = counted
            totals = self._totals + Counter(counted)
            return {"restarts": 0.0, **dict.fromkeys(counted, 0.0), **totals, **gauges}

    def stop(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._process.stop()
        os.close(self._segment)
