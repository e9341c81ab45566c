"""Seeded requests whose prompt is computed in several steps, on a CPU.

After a step in which a prompt is not done yet, vLLM throws away the token that it sampled for it, and takes the draw
back by moving the offset of the request's generator. Generators of a CPU have no offset: the server would end. Here
their state is kept from before the draw, and put back.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def install() -> bool:
    """Change vLLM's model runner, once; False if it does not look as expected."""
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    except ImportError:
        return False
    if getattr(GPUModelRunner, "_areal_installed", False):
        return True
    if not all(hasattr(GPUModelRunner, name) for name in ("_sample", "_bookkeeping_sync")):
        return False
    plain_sample, plain_bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._areal_states = [(generator, generator.get_state()) for generator in _unfinished(self).values()]
        return plain_sample(self, *args, **kwargs)

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = _unfinished(self)
        for row in held:
            del self.input_batch.generators[row]
        try:
            return plain_bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(held)
            for generator, state in self.__dict__.pop("_areal_states", ()):
                generator.set_state(state)

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sample, bookkeeping
    GPUModelRunner._areal_installed = True
    return True


def _unfinished(runner: Any) -> dict[int, Any]:
    """``row -> CPU generator`` of the requests whose prompt is not done with this step."""
    batch = runner.input_batch
    rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    found = {row: batch.generators[row] for row in rows if batch.generators.get(row) is not None}
    return {row: generator for row, generator in found.items() if generator.device.type == "cpu"}
