"""Rewards and datasets of these tests, found by import path."""

from __future__ import annotations

import os
import time
from typing import Any


def digits_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """A number that differs between samples of an untrained model: the share of even token ids."""
    return sum(1 for token in completion_ids if token % 2 == 0) / max(1, len(completion_ids))


def length_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return len(completions) / 100


def _sometimes(completion_ids: list[int], bad: Any) -> Any:
    """Misbehave for about one completion in four, decided by its tokens alone."""
    if sum(completion_ids) % 4 == 0:
        return bad()
    return float(sum(completion_ids) % 7)


def raises_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    def bad() -> float:
        raise RuntimeError("sometimes broken")

    return _sometimes(completion_ids, bad)


def hangs_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return _sometimes(completion_ids, lambda: time.sleep(3600))


def none_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return _sometimes(completion_ids, lambda: None)


def nan_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return _sometimes(completion_ids, lambda: float("nan"))


def list_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return _sometimes(completion_ids, lambda: [1.0])


def tensor_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    def bad() -> Any:
        import torch

        return torch.tensor(1.0)

    return _sometimes(completion_ids, bad)


def exits_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return _sometimes(completion_ids, lambda: os._exit(3))


def always_raises_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    raise RuntimeError("always broken")


def long_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    """Prompts far longer than the tiny model's context."""
    return [{"messages": [{"role": "user", "content": "7 + 5 = 12 " * 100}], "answer": "12"}] * 4


def wrong_columns_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    return [{"question": "7 + 5", "answer": "12"}] * 4
