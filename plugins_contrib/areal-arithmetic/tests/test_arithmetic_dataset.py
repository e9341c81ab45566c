from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from areal_arithmetic.config import ArithmeticConfig
from areal_arithmetic.dataset import get_arithmetic_dataset
from areal_arithmetic.model import train_tokenizer
from areal_arithmetic.problems import is_held_out
from areal_core import BadInputError


def numbers_in(row: dict) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", row["messages"][0]["content"]))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def test_rl_rows_when_made_have_question_and_right_answer():
    # Arrange
    kinds = ["add", "sub", "mul", "two"]

    # Act
    rows = get_arithmetic_dataset(None, "train", kind="rl", size=500, max_number=20, kinds=kinds)

    # Assert: the answer follows from the numbers and the wording alone
    assert len(rows) == 500
    for row in rows:
        (message,) = row["messages"]
        text, numbers = message["content"], numbers_in(row)
        if "loses" in text:
            expected = numbers[0] + numbers[1] - numbers[2]
        elif "gave" in text or "fewer" in text:
            expected = numbers[0] - numbers[1]
        elif "boxes" in text:
            expected = numbers[0] * numbers[1]
        else:
            expected = numbers[0] + numbers[1]
        assert message["role"] == "user"
        assert row["answer"] == str(expected)


def test_splits_when_made_share_no_numbers():
    train = get_arithmetic_dataset(None, "train", kind="rl", size=5000)
    test = get_arithmetic_dataset(None, "test", kind="rl", size=300)

    assert len(test) == 300
    assert not {numbers_in(r) for r in train} & {numbers_in(r) for r in test}


def test_is_held_out_when_called_in_another_process_agrees():
    # Arrange: Python's own hash() of strings changes from process to process, and this must not
    tuples = [(a, b, c) for a in range(2, 8) for b in range(2, 8) for c in range(2, 8)]
    code = (
        "import json; from areal_arithmetic.problems import is_held_out;"
        "print(json.dumps([is_held_out((a, b, c)) for a in range(2, 8) for b in range(2, 8) for c in range(2, 8)]))"
    )

    # Act
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "7"})

    # Assert
    here = [is_held_out(t) for t in tuples]
    assert json.loads(other.stdout) == here
    assert 0.05 < sum(here) / len(here) < 0.15


def test_rows_when_seed_changes_differ_in_train_and_not_in_test():
    def questions(split: str, seed: int) -> list[str]:
        rows = get_arithmetic_dataset(None, split, kind="rl", size=50, seed=seed)
        return [row["messages"][0]["content"] for row in rows]

    assert questions("train", 0) == questions("train", 0)
    assert questions("train", 0) != questions("train", 1)
    assert questions("test", 0) == questions("test", 1)


def test_sft_rows_when_shares_are_zero_hold_the_full_solution():
    rows = get_arithmetic_dataset(None, "train", kind="sft", size=200, sloppy=0.0, no_format=0.0)
    answers = get_arithmetic_dataset(None, "train", kind="rl", size=200)

    for row, answer in zip(rows, answers, strict=True):
        user, assistant = row["messages"]
        assert [user] == answer["messages"]
        assert assistant["content"].endswith(f"\n#### {answer['answer']}")


def test_sft_rows_when_shares_are_set_have_those_shares():
    rows = get_arithmetic_dataset(None, "train", kind="sft", size=4000, kinds=["two"], sloppy=0.65, no_format=0.15)

    texts = [row["messages"][1]["content"] for row in rows]
    assert sum(text.count("=") == 1 for text in texts) / len(texts) == pytest.approx(0.65, abs=0.03)
    assert sum("####" not in text for text in texts) / len(texts) == pytest.approx(0.15, abs=0.03)


@pytest.mark.parametrize("kind", ["rw", "dpo"])
def test_pair_rows_reject_what_stops_early_or_is_wrong(kind):
    # Arrange
    rows = get_arithmetic_dataset(None, "train", kind=kind, size=2000, kinds=["two"], stop_early=0.7)
    answers = get_arithmetic_dataset(None, "train", kind="rl", size=2000, kinds=["two"])

    # Assert
    for row, answer in zip(rows, answers, strict=True):
        assert row["messages"] == answer["messages"]
        assert row["chosen"].endswith(f"\n#### {answer['answer']}")
        steps, result = row["rejected"].split("\n#### ")
        assert steps.endswith(f"={result}") and row["rejected"] != row["chosen"]
        assert steps.count("=") == 1 or result != answer["answer"]
    early = sum(row["rejected"].count("=") == 1 for row in rows)
    assert early / len(rows) == pytest.approx(0.7, abs=0.04)


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_max_length_when_set_drops_longer_rows(tokenizer, kind):
    # Arrange
    rows = get_arithmetic_dataset(None, "train", kind=kind, size=100)
    lengths = [
        len(tokenizer.apply_chat_template(r["messages"], add_generation_prompt=kind == "rl")["input_ids"]) for r in rows
    ]
    limit = sorted(lengths)[50]

    # Act
    kept = get_arithmetic_dataset(None, "train", kind=kind, tokenizer=tokenizer, max_length=limit, size=100)

    # Assert
    assert kept == [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    assert 0 < len(kept) < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "somewhere"}, "remove path: 'somewhere'"),
        ({"split": "dev"}, "train and test, not 'dev'"),
        ({"kind": "chat"}, "rl, sft, rw and dpo, not 'chat'"),
        ({"max_length": 3}, "Raise max_length"),
        ({"split": "test", "max_number": 4, "kinds": ["sub"]}, "no held-out problem exists"),
    ],
)
def test_dataset_when_input_is_bad_says_what_is_right(tokenizer, arguments, message):
    call = {"path": None, "split": "train", "kind": "rl", "tokenizer": tokenizer, "size": 10, **arguments}

    with pytest.raises(BadInputError, match=re.escape(message)):
        get_arithmetic_dataset(call.pop("path"), call.pop("split"), **call)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"max_number": 3}, {"kinds": []}, {"kinds": ["div"]}, {"sloppy": 1.5}, {"no_format": -1}]
)
def test_config_when_value_is_out_of_range_raises(options):
    with pytest.raises(ValueError, match="must be"):
        ArithmeticConfig(**options)
