"""Log-probs by the framework's definition, from servers that a run starts.

The definition is ``log_softmax(logits / T)`` over the whole vocabulary, before penalties, banned tokens and truncation.
vLLM has it at T = 1 (``raw_logprobs``), or after all of that (``processed_logprobs``). Here a sampler that is made for
``processed_logprobs`` divides what ``raw_logprobs`` takes by the temperature of each row. A server whose sampler is
another one keeps its own log-probs: the engine asks each server which it gives.
"""

from __future__ import annotations

from typing import Any

import torch

_GREEDY_BELOW = 1e-5


def install() -> bool:
    """Change vLLM's sampler, once; False if it does not look as expected."""
    try:
        from vllm.v1.sample.sampler import Sampler
    except ImportError:
        return False
    if getattr(Sampler, "_areal_installed", False):
        return True
    if not isinstance(Sampler.__dict__.get("compute_logprobs"), staticmethod):
        return False
    plain_init, plain_forward = Sampler.__init__, Sampler.forward

    def init(self: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **kwargs: Any) -> None:
        tempered = logprobs_mode == "processed_logprobs"
        plain_init(self, "raw_logprobs" if tempered else logprobs_mode, *args, **kwargs)
        self._areal_tempered, self._areal_temperature = tempered, None

    def forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._areal_tempered:
            return plain_forward(self, logits, sampling_metadata, *args, **kwargs)
        # None where all rows are greedy, whose temperature counts as 1.
        self._areal_temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        try:
            return plain_forward(self, logits, sampling_metadata, *args, **kwargs)
        finally:
            self._areal_temperature = None

    def compute_logprobs(self: Any, logits: torch.Tensor) -> torch.Tensor:
        temperature = self._areal_temperature
        # Prompts, and drafts of another number of rows, are scored at temperature 1.
        if temperature is not None and len(temperature) == len(logits):
            scale = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)
            logits = logits.to(torch.float32) / scale.unsqueeze(1)
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    Sampler.__init__, Sampler.forward = init, forward
    Sampler.compute_logprobs = compute_logprobs
    Sampler._areal_installed = True
    return True
