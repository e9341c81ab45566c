"""Hook implementations of areal-vllm. Imports nothing heavy."""

from __future__ import annotations

from areal_core import Registration, hookimpl

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_inference_engines() -> list[Registration]:
    return [
        Registration(
            name="vllm",
            target="areal_vllm.engine:VLLMEngine",
            config="areal_vllm.config:VLLMConfig",
            description="vLLM servers, started by the run or by somebody else, over HTTP",
            metadata={"backend_letters": "dtp"},
        )
    ]
