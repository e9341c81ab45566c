"""A second reward for GSM8K, for the algorithm that takes several."""

from __future__ import annotations

from typing import Any


def boxed_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    r"""1.0 if the completion has exactly one ``\boxed{}``, whatever is in it."""
    return float(completions.count(r"\boxed{") == 1)
