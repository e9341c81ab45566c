"""Rewards and datasets of these tests, found by import path."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def digits_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """A number that differs between samples of an untrained model: the share of even token ids."""
    return sum(1 for token in completion_ids if token % 2 == 0) / max(1, len(completion_ids))


def length_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return len(completions) / 100


def always_raises_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    raise RuntimeError("always broken")


def long_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    """Prompts far longer than the tiny model's context."""
    return [{"messages": [{"role": "user", "content": "7 + 5 = 12 " * 100}], "answer": "12"}] * 4


def wrong_columns_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    return [{"question": "7 + 5", "answer": "12"}] * 4


def by_column_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, how: str, **data: Any
) -> Any:
    """Misbehaves as the column ``how`` says; else the number of tokens."""
    match how:
        case "raise":
            raise ValueError("no such answer")
        case "hang":
            time.sleep(3600)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    answers = {"none": None, "nan": float("nan"), "inf": float("inf"), "bool": True, "str": "1.0", "array": np.ones(1)}
    answers |= {"list": [1.0], "wrong length": [1.0, 0.0], "empty": []}
    return answers.get(how, len(completion_ids))


async def even_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return digits_reward_fn(prompt, completions, prompt_ids, completion_ids)


#: What a row of ``misbehaving_dataset`` does to ``by_column_reward_fn``, and the kind of error that is.
MISBEHAVIOUR = {
    "raise": "raised",
    "hang": "timeout",
    "sys.exit": "exited",
    "os._exit": "exited",
    "kill": "exited",
    "none": "none",
    "nan": "nan",
    "inf": "inf",
    "bool": "type",
    "str": "type",
    "array": "type",
    "list": "type",
    "wrong length": "type",
    "empty": "type",
}


def misbehaving_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    """One row for each way to misbehave, and two that do not."""
    return [{"messages": [{"role": "user", "content": "7 + 5"}], "how": how} for how in (*MISBEHAVIOUR, "a", "b")]


def half_misbehaving_dataset(
    path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any
) -> list[dict[str, Any]]:
    """Four rows, one of which gives NaN."""
    return [{"messages": [{"role": "user", "content": "7 + 5"}], "how": how} for how in ("a", "b", "nan", "c")]


def rare_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """1 for about one completion in three, decided by its tokens alone."""
    return float(sum(completion_ids) % 3 == 0)


def always_one_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 1.0


def marking_hang_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """Says that it was called, and never answers."""
    Path(os.environ["TRAINER_TEST_MARK"]).touch()
    time.sleep(3600)
    return 0.0


def bytes_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    """Rows with a column that JSON cannot hold."""
    return [{"messages": [{"role": "user", "content": f"{n} + 1"}], "picture": bytes([n])} for n in range(16)]


def picture_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: list[int], picture: bytes, **data: Any
) -> float:
    assert f"{picture[0]} + 1" in prompt
    return digits_reward_fn(prompt, completions, prompt_ids, completion_ids)
