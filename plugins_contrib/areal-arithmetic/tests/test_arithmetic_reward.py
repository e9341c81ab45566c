from __future__ import annotations

import pytest

from areal_arithmetic.reward import arithmetic_reward_fn


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("7+5=12\n12-3=9\n#### 9", "9", 1.0),
        ("#### 9", "9", 1.0),
        ("#### 9\n", "9", 1.0),
        ("#### -2", "-2", 1.0),
        ("#### 9", 9, 1.0),
        ("7+5=12\n#### 12", "9", 0.0),
        ("7+5=12\n12-3=9", "9", 0.0),
        ("9", "9", 0.0),
        ("#### 9 apples", "9", 0.0),
        ("#### 9\n10+1=11", "9", 0.0),
        ("#### 19", "9", 0.0),
        ("#### 8\n#### 9", "9", 1.0),
        ("#### 9\n#### 8", "9", 0.0),
        ("", "9", 0.0),
    ],
)
def test_reward_when_completion_ends_with_answer_line_is_one(completion, answer, expected):
    assert arithmetic_reward_fn("question", completion, [], [], answer=answer, extra=1) == expected
