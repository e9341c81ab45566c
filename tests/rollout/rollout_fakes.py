"""An inference engine for tests: answers in the event loop, at once or when told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import ModelRequest, ModelResponse


class FakeEngine(InferenceEngine):
    """Answers each request with ``tokens(request)`` ids, or holds them while paused."""

    def __init__(self, tokens: Callable[[ModelRequest], list[int]] = lambda request: [7, 8, 9]) -> None:
        self.tokens = tokens
        self.version = 0
        self.requests: list[ModelRequest] = []
        self.calls: list[str] = []
        self.paused = False
        self.served: list[str] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        while self.paused:
            await asyncio.sleep(0.001)
        self.served.append(request.rid)
        output = self.tokens(request)
        return ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=output,
            output_logprobs=[-1.0] * len(output),
            output_versions=[self.version] * len(output),
        )

    def initialize(self, model_path, tokenizer=None, ft_spec=None):
        pass

    def destroy(self):
        pass

    def pause_generation(self):
        self.calls.append("pause")
        self.paused = True

    def continue_generation(self):
        self.calls.append(f"continue:{len(self.requests)}")
        self.paused = False

    def update_weights_from_disk(self, meta):
        pass

    def set_version(self, version):
        self.version = version

    def get_version(self):
        return self.version


class FakeLoader:
    """Endless batches of ``size`` rows named ``batch-index``."""

    def __init__(self, size: int) -> None:
        self.size, self.batches = size, 0

    def next_batch(self) -> list[dict]:
        rows = [{"_uid": f"{self.batches}-{index}", "n": index} for index in range(self.size)]
        self.batches += 1
        return rows
