"""The reward `arithmetic`."""

from __future__ import annotations

import re
from typing import Any

_ANSWER_LINE = re.compile(r"#### (-?\d+)\s*$")


def arithmetic_reward_fn(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, *, answer: str, **data: Any
) -> float:
    """1.0 if the completion ends with ``#### N`` and N is the answer, else 0.0."""
    match = _ANSWER_LINE.search(completions)
    return 1.0 if match is not None and int(match[1]) == int(answer) else 0.0
