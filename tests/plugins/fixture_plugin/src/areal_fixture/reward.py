"""The reward `count`."""

from __future__ import annotations

from typing import Any


def count_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, characters: str, enough: int, **data: Any
) -> float:
    """The share of ``enough`` wanted characters that the completion has, at most 1."""
    return min(1.0, sum(completions.count(character) for character in characters) / enough)
