"""Rewards and datasets that the command-line tests name by import path."""

from __future__ import annotations

import time
from typing import Any


def length_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, weight: int = 1, **data: Any
) -> float:
    return float(len(completions) * weight)


def answer_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str) -> float:
    return float(completions == f"{prompt}{answer}")


def raises_reward_fn(*args: Any, **data: Any) -> float:
    raise KeyError("no such column")


def hangs_reward_fn(*args: Any, **data: Any) -> float:
    time.sleep(600)
    return 0.0


def none_reward_fn(*args: Any, **data: Any) -> None:
    return None


def nan_reward_fn(*args: Any, **data: Any) -> float:
    return float("nan")


async def async_reward_fn(*args: Any, **data: Any) -> float:
    return 0.5


def rows(path: str | None, split: str, *, kind: str, tokenizer: Any, max_length: int | None) -> list[dict[str, Any]]:
    if split == "empty":
        return []
    row = {"messages": [{"role": "user", "content": f"{split} as {kind}?"}], "answer": "x" * 1000, "n": 3}
    return [row, {**row, "messages": [{"role": "user", "content": "a much longer question than the first one"}]}]


def image_rows(path: Any, split: str, **options: Any) -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    pixels = np.zeros((2, 3, 3), np.uint8)
    part = {"type": "image", "image": Image.fromarray(pixels)}
    return [{"messages": [{"role": "user", "content": [part]}], "images": [pixels, b"1234"]}]


def tool_rows(path: Any, split: str, **options: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    chat = [
        {"role": "user", "content": "one more"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    return [{"messages": chat, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}]
