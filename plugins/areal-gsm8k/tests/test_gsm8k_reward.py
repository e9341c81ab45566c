from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from areal_gsm8k.numbers import parse_number
from areal_gsm8k.reward import extract_answer, gsm8k_reward_fn

SHARED = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
DATA = Path(os.environ.get("AREAL_TEST_GSM8K", SHARED))


def score(completion: str, answer: str, **options) -> float:
    return gsm8k_reward_fn("question", completion, [], [], answer, **options)


RIGHT = [
    # where the answer stands
    ("#### 18", "18"),
    ("####18", "18"),
    ("She makes 9 * 2 = 18.\n#### 18", "She makes $<<9*2=18>>18.\n#### 18"),
    ("####\n18", "18"),
    ("#### 17\nNo, wait.\n#### 18", "18"),
    ("#### 18\nThat took 3 steps.", "18"),
    (r"The answer is \boxed{18}.", "18"),
    (r"\boxed{17} is wrong, so \boxed{18}", "18"),
    (r"\boxed{\text{18 dollars}}", "18"),
    (r"\boxed{\frac{3}{4}}", "3/4"),
    (r"#### 17 and then \boxed{18}", "18"),
    (r"\boxed{17} and then" + "\n#### 18", "18"),
    (r"#### \boxed{18}", "18"),
    (r"\boxed{18} or \boxed{1", "18"),
    ("#### 18<|im_end|>", "18"),
    ("#### 18</s>", "#### 18"),
    # how a number is written
    ("#### 1,234,567", "1234567"),
    ("#### 1234567", "1,234,567"),
    ("#### 1{,}234", "1234"),
    ("#### 1\u202f234", "1234"),
    ("#### $18", "18"),
    (r"#### \$18.50", "18.5"),
    ("#### €18", "18"),
    ("#### 18 USD", "18"),
    ("#### 25%", "25"),
    (r"#### 25\%", "25"),
    ("#### 25 percent", "25"),
    ("#### 25%", "0.25"),
    ("#### 0.25", "25%"),
    ("#### 18.00", "18"),
    ("#### 18", "18.0"),
    ("#### 18.", "18"),
    ("#### 0.5", ".5"),
    ("#### 1/2", "0.5"),
    ("#### 2/4", "1/2"),
    (r"#### \frac{1}{2}", "0.5"),
    (r"#### -\dfrac12", "-0.5"),
    ("#### 1 1/2", "1.5"),
    (r"#### 1\frac{1}{2}", "3/2"),
    ("#### 3½", "3.5"),
    ("#### +18", "18"),
    ("#### -18", "-18"),
    ("#### - 18", "-18"),
    ("#### −18", "-18"),
    ("#### –18", "-18"),
    ("#### -$18", "-18"),
    ("#### $-18", "-18"),
    ("#### minus 18", "-18"),
    ("#### a change of -18", "-18"),
    ("#### Answer: - 18", "-18"),
    ("#### 1.8e1", "18"),
    ("#### 1.8E+3", "1800"),
    (r"#### 1.8 \times 10^{3}", "1800"),
    ("#### 1.8×10³", "1800"),
    ("#### 2 million", "2000000"),
    ("#### 18", "18"),
    # what stands around it
    ("#### 18 apples", "18"),
    ("#### 18 miles per hour", "18"),
    ("#### 18 miles/hour", "18"),
    ("#### 18 cm^2", "18"),
    ("#### 18 m²", "18"),
    ("#### 18°", "18"),
    (r"#### 18 \text{ cm}", "18"),
    (r"#### $18$", "18"),
    (r"#### \(18\)", "18"),
    ("#### **18**", "18"),
    ("#### `18`", "18"),
    ("#### x = 18", "18"),
    ("#### 3 * 6 = 18", "18"),
    ("#### The answer is 18.", "18"),
    ("#### Total: $18", "18"),
    ("#### 18!", "18"),
    # what is no plain number
    ("#### 3 + 15", "18"),
    (r"#### 2 \times 9", "18"),
    (r"#### \sqrt{324}", "18"),
    ("#### (18)", "18"),
    (r"#### 2\pi", r"2\pi"),
    ("#### 1 + x", "x + 1"),
    ("#### 2:30", "2:30"),
    ("#### blue", "blue"),
]

WRONG = [
    ("", "18"),
    ("18", "18"),
    ("The answer is 18.", "18"),
    ("####", "18"),
    ("#### ", "18"),
    (r"\boxed{}", "18"),
    (r"\boxed{18", "18"),
    ("#### 17", "18"),
    ("#### 181", "18"),
    ("#### -18", "18"),
    ("#### 18", "-18"),
    ("#### 1.8", "18"),
    ("#### 18.01", "18"),
    ("#### 17.9999999999999999", "18"),
    ("#### 0.333", "1/3"),
    ("#### 250%", "25"),
    ("#### x - 18", "-18"),
    ("#### x + 18", "18"),
    ("#### 0.25", "25"),
    ("#### 1,8", "18"),
    ("#### 1,80", "180"),
    ("#### 18/0", "18"),
    ("#### 2x", "2"),
    ("#### 18 or 20", "18"),
    ("#### 18, 20", "18"),
    ("#### 18-20", "18"),
    ("#### 5 ft 3 in", "5"),
    ("#### 18\n#### 17", "18"),
    (r"#### 18 but \boxed{17}", "18"),
    ("#### 1e999999999", "18"),
    ("#### 9^{9^{9^{9}}}", "18"),
    ("#### 9**9**9**9", "18"),
    ("#### 10^999999999", "18"),
    ("#### (((9!)!)!)", "18"),
    (r"#### \frac{1}{", "18"),
    ("#### " + "9" * 10_000, "18"),
    ("#### eighteen", "18"),
    ("#### blue", "red"),
]


def test_tables_when_counted_hold_at_least_sixty_cases():
    assert len(set(RIGHT)) + len(set(WRONG)) >= 60


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_reward_when_answers_are_equal_is_one(completion, answer):
    assert score(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_reward_when_answers_differ_is_zero(completion, answer):
    assert score(completion, answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("She makes $18 a day.", 1.0),
        ("First 3, then 18.", 1.0),
        ("20 - 2 = 18", 1.0),
        ("36 - 18", 1.0),
        ("It is -18", 0.0),
        ("First 18, then 3.", 0.0),
        ("No number", 0.0),
        ("18 is near.\n#### 17", 0.0),
    ],
)
def test_reward_when_last_number_is_set_judges_unmarked_completions(completion, expected):
    assert score(completion, "#### 18", last_number=True) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3.2e-2", Fraction(32, 1000)),
        ("-1,234.5", Fraction(-2469, 2)),
        ("1 3/4 cups", Fraction(7, 4)),
        ("$1.5 billion", Fraction(1_500_000_000)),
        ("0.1", Fraction(1, 10)),
        ("two", None),
        ("3/4/2026", None),
        ("1.2.3", None),
    ],
)
def test_parse_number_when_given_text_is_exact(text, value):
    number = parse_number(text)

    assert (number.value if number is not None else None) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{a{b}{c{d}}} end", "a{b}{c{d}}"),
        (r"\boxed {7}", "7"),
        ("a #### b #### c\nd", "c"),
        ("nothing", None),
    ],
)
def test_extract_answer_when_nested_or_repeated_takes_the_last_whole(text, expected):
    assert extract_answer(text) == expected


def test_reward_when_called_in_worker_threads_uses_math_verify():
    # Arrange: signal-based timeouts raise outside the main thread, and would turn every right expression into 0
    cases = [(f"#### {a} + {b}", str(a + b)) for a in range(2, 10) for b in range(2, 6)]

    # Act
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda case: score(*case), cases))

    # Assert
    assert scores == [1.0] * len(cases)


@pytest.mark.skipif(not DATA.is_dir(), reason="AREAL_TEST_GSM8K names no folder, and ../shared has none")
@pytest.mark.parametrize("split", ["train", "test"])
def test_reward_when_given_every_reference_scores_it_alone(split):
    # Arrange
    answers = [json.loads(line)["answer"] for line in (DATA / f"{split}.jsonl").read_text().splitlines()]
    assert len(answers) > 1000
    final = [answer.rsplit("#### ", 1)[1].replace(",", "") for answer in answers]

    # Act
    own = [score(answer, answer) for answer in answers]
    bare = [score(f"#### {number}", answer) for number, answer in zip(final, answers, strict=True)]
    others = [
        score(answers[i - 1], answers[i]) for i in range(len(answers)) if Fraction(final[i - 1]) != Fraction(final[i])
    ]

    # Assert
    assert own == bare == [1.0] * len(answers)
    assert len(others) > 1000 and not any(others)
