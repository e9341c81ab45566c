"""Workflows of these tests, found by import path."""

from __future__ import annotations

from typing import Any

from areal_core.rollout.workflows.rlvr import RLVRWorkflow


class MixedWorkflow(RLVRWorkflow):
    """Plays ``rlvr``, but one episode of each row is rejected, and one of every second row fails."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if engine.sample == 1:
            return None
        if engine.sample == 2 and data["_index"] % 2:
            raise LookupError("no such page")
        return await super().arun_episode(engine, data)
