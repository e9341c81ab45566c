"""Options of the embedded engine: ``rollout.local.*``."""

from __future__ import annotations

import attrs

from areal_core.config.fields import option


@attrs.define(kw_only=True)
class LocalConfig:
    """The embedded engine."""

    process: bool = option(False, "Generate in a process of its own instead of a thread of the trainer's.")
    max_batch_size: int = option(256, "Most sequences decoded together; further requests wait.", ge=1)
    max_seq_len: int | None = option(None, "Most tokens of prompt and completion; None: the model's context.", ge=2)
    device: str | None = option(None, "Device of the model, e.g. cuda:1; None: cuda if there is one, else cpu.")
    seed: int = option(0, "Seed of requests that bring none.")
    prefill_tokens: int = option(8192, "Most prompt tokens of one forward pass (a longer prompt stands alone).", ge=1)
    num_threads: int | None = option(
        None, "CPU threads of generation; None: one for a model of under 10M parameters, else torch's setting.", ge=1
    )
    share_weights: bool = option(
        True,
        "Read the trainer's weights in place where that is safe (a thread, synchronous mode, same type and device).",
    )
    model_spec: str | None = option(
        None, "Run the native model of this model spec (or package.module:spec); None: only types new to transformers."
    )
    slow_decoder: bool = option(False, "Decode in the plain way: no slotted cache (to compare).")
