"""Hook implementations of areal-fsdp. Imports nothing heavy."""

from __future__ import annotations

from areal_core import Registration, hookimpl

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_train_engines() -> list[Registration]:
    return [
        Registration(
            name="fsdp",
            target="areal_fsdp.engine:FSDPEngine",
            config="areal_fsdp.config:FSDPConfig",
            description="PyTorch FSDP2 over any transformers causal LM",
            metadata={"backend_letters": "dtc"},
        )
    ]
