"""The inference engine that talks to vLLM servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from areal_vllm.config import VLLMConfig


class VLLMEngine(InferenceEngine):
    """vLLM servers over HTTP."""

    takes_adapters: ClassVar[bool] = True

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self.options: VLLMConfig = config.options if isinstance(config.options, VLLMConfig) else VLLMConfig()
        self._launched: Any = None
        self._model_path = ""
        self._version = 0

    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        raise NotImplementedError

    def destroy(self) -> None:
        self.teardown_server()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    def pause_generation(self) -> None:
        raise NotImplementedError

    def continue_generation(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- weights

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        from areal_vllm import weight_update

        weight_update.update_from_disk(self, meta)

    def init_weights_update_group(self, meta: WeightUpdateMeta) -> None:
        from areal_vllm import weight_update

        weight_update.init_group(self, meta)

    def update_weights_from_distributed(self, meta: WeightUpdateMeta, specs: list[tuple[str, list[int], str]]) -> None:
        from areal_vllm import weight_update

        weight_update.update_from_distributed(self, meta, specs)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    # ------------------------------------------------------------------------------------------- servers

    def launch_server(self, server_args: Mapping[str, Any] | None = None) -> list[str]:
        from areal_vllm import servers

        self._launched = servers.launch(self.config, self._model_path, server_args)
        return list(self._launched.addresses)

    def teardown_server(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.stop()
