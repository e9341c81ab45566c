"""Word problems from templates, with their solutions, and the split of their numbers into train and held-out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import attrs

NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Zoe", "Max", "Eva")
THINGS = ("apples", "books", "coins", "pens", "cards", "eggs", "balls", "cups")
LARGEST_FACTOR = 12


@attrs.frozen
class Problem:
    """One question.

    Attributes:
        question: what the user asks.
        steps: the calculations that solve it in order, e.g. ``("7+5=12", "12-3=9")``.
        answer: the result of the last one.
        numbers: the numbers in the question; they decide the split.
    """

    question: str
    steps: tuple[str, ...]
    answer: int
    numbers: tuple[int, ...]

    @property
    def solution(self) -> str:
        return "\n".join([*self.steps, f"#### {self.answer}"])


def make_problem(rng: random.Random, max_number: int, kinds: Sequence[str]) -> Problem:
    """One problem of a kind drawn from ``kinds``, with numbers from 2 to ``max_number``."""
    kind = rng.choice(kinds)
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    if kind == "add":
        a, b = rng.randint(2, max_number), rng.randint(2, max_number)
        question = rng.choice(
            [
                f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
                f"{name} has {a} {things}. {other} has {b} {things}. How many {things} do they have in total?",
            ]
        )
        return Problem(question, (f"{a}+{b}={a + b}",), a + b, (a, b))
    if kind == "sub":
        a = rng.randint(4, max_number)
        b = rng.randint(2, a - 1)
        question = rng.choice(
            [
                f"{name} had {a} {things} and gave {b} to {other}. How many {things} are left?",
                f"{name} has {a} {things}. {other} has {b} fewer {things} than {name}. "
                f"How many {things} does {other} have?",
            ]
        )
        return Problem(question, (f"{a}-{b}={a - b}",), a - b, (a, b))
    if kind == "mul":
        largest = min(max_number, LARGEST_FACTOR)
        a, b = rng.randint(2, largest), rng.randint(2, largest)
        question = f"{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?"
        return Problem(question, (f"{a}*{b}={a * b}",), a * b, (a, b))
    a, b = rng.randint(2, max_number), rng.randint(2, max_number)
    c = rng.randint(2, min(max_number, a + b - 1))
    question = f"{name} has {a} {things}, buys {b} more and then loses {c}. How many {things} does {name} have now?"
    return Problem(question, (f"{a}+{b}={a + b}", f"{a + b}-{c}={a + b - c}"), a + b - c, (a, b, c))


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether questions with these numbers belong to the test split: about one tuple in ten, the same everywhere."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return digest[0] % 10 == 0


def write_mistake(problem: Problem, rng: random.Random, stop_early: float) -> str:
    """A solution that a careful reader rejects: it stops one step early, or its last result is a little off."""
    steps = problem.steps
    if len(steps) > 1 and rng.random() < stop_early:
        steps = steps[:-1]
        result = int(steps[-1].split("=")[1])
    else:
        result = problem.answer + rng.choice([step for step in (-2, -1, 1, 2) if problem.answer + step >= 0])
        steps = (*steps[:-1], f"{steps[-1].split('=')[0]}={result}")
    return "\n".join([*steps, f"#### {result}"])


def write_demonstration(problem: Problem, rng: random.Random, sloppy: float, no_format: float) -> str:
    """A solution of mixed quality: a careless solver stops one step early, or leaves out the answer line."""
    steps = problem.steps
    if len(steps) > 1 and rng.random() < sloppy:
        steps = steps[:-1]
    body = "\n".join(steps)
    if rng.random() < no_format:
        return body
    return f"{body}\n#### {steps[-1].split('=')[1]}"
