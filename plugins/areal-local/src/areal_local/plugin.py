"""Hook implementations of areal-local. Imports nothing heavy."""

from __future__ import annotations

from areal_core import Registration, hookimpl

AREAL_API_VERSION = "1.0"


@hookimpl
def areal_inference_engines() -> list[Registration]:
    return [
        Registration(
            name="local",
            target="areal_local.engine:LocalEngine",
            config="areal_local.config:LocalConfig",
            description="Embedded engine, in a thread or a process of its own, pure torch; the default",
        )
    ]
