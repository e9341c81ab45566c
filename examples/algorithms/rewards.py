"""A second reward for the quickstart's task, for the algorithm that takes several."""

from __future__ import annotations

import re
from typing import Any

_ANSWER_LINE = re.compile(r"#### -?\d+\s*$")


def answer_line_reward_fn(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """1.0 if the completion ends with ``#### N``, whatever N is."""
    return float(_ANSWER_LINE.search(completions) is not None)
