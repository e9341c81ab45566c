"""The dataset `arithmetic`."""

from __future__ import annotations

import random
from typing import Any

from areal_arithmetic.config import ArithmeticConfig
from areal_arithmetic.problems import Problem, is_held_out, make_problem, write_demonstration, write_mistake
from areal_core import BadInputError

# A split whose numbers are this rare does not exist for the given options.
_MOST_MISSES_IN_A_ROW = 10_000
_TEST_SEED = "held-out"


def get_arithmetic_dataset(
    path: str | None,
    split: str,
    *,
    kind: str,
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Make the rows of one split. Questions of ``train`` and ``test`` never share their numbers.

    Args:
        path: must be None: nothing is read.
        split: ``train`` or ``test``.
        kind: ``rl`` gives ``messages`` (the question) and ``answer`` (a string of digits); ``sft`` gives ``messages``
            that end with a demonstration of mixed quality; ``rw`` and ``dpo`` give ``messages`` (the question), and the
            answers ``chosen`` (a careful solution) and ``rejected`` (one that stops early or is wrong).
        tokenizer: counts tokens for ``max_length``, by its chat template.
        max_length: longer rows are dropped.
        options: fields of :class:`ArithmeticConfig`.

    Raises:
        BadInputError: for another split, kind or path, or if the options leave a split without rows.
    """
    if path is not None:
        raise BadInputError(f"dataset 'arithmetic' makes its rows and reads nothing: remove path: {path!r}")
    if split not in ("train", "test"):
        raise BadInputError(f"dataset 'arithmetic' has the splits train and test, not {split!r}")
    if kind not in ("rl", "sft", "rw", "dpo"):
        raise BadInputError(f"dataset 'arithmetic' has the forms rl, sft, rw and dpo, not {kind!r}")
    config = ArithmeticConfig(**options)
    problems = _draw_problems(config, held_out=split == "test")
    if kind == "rl":
        rows = _rl_rows(problems)
    else:
        rows = _sft_rows(problems, config) if kind == "sft" else _pair_rows(problems, config)
    if max_length is not None:
        rows = [row for row in rows if _count_tokens(row, kind, tokenizer) <= max_length]
        if not rows:
            raise BadInputError(
                f"dataset 'arithmetic': none of the {config.size} rows of {split} has at most max_length={max_length} "
                "tokens. Raise max_length."
            )
    return rows


def _draw_problems(config: ArithmeticConfig, *, held_out: bool) -> list[Problem]:
    rng = random.Random(_TEST_SEED if held_out else config.seed)
    problems: list[Problem] = []
    misses = 0
    while len(problems) < config.size:
        problem = make_problem(rng, config.max_number, config.kinds)
        if is_held_out(problem.numbers) == held_out:
            problems.append(problem)
            misses = 0
        elif (misses := misses + 1) > _MOST_MISSES_IN_A_ROW:
            raise BadInputError(
                f"dataset 'arithmetic': no {'held-out' if held_out else 'training'} problem exists for "
                f"max_number={config.max_number}, kinds={config.kinds}. Raise max_number, or add kinds."
            )
    return problems


def _rl_rows(problems: list[Problem]) -> list[dict[str, Any]]:
    return [{"messages": [_user(p)], "answer": str(p.answer)} for p in problems]


def _sft_rows(problems: list[Problem], config: ArithmeticConfig) -> list[dict[str, Any]]:
    # A generator of its own, so that the shares do not change which questions are drawn.
    rng = random.Random(f"demonstrations of {config.seed}")
    return [
        {
            "messages": [
                _user(p),
                {"role": "assistant", "content": write_demonstration(p, rng, config.sloppy, config.no_format)},
            ]
        }
        for p in problems
    ]


def _pair_rows(problems: list[Problem], config: ArithmeticConfig) -> list[dict[str, Any]]:
    rng = random.Random(f"pairs of {config.seed}")
    return [
        {"messages": [_user(p)], "chosen": p.solution, "rejected": write_mistake(p, rng, config.stop_early)}
        for p in problems
    ]


def _user(problem: Problem) -> dict[str, str]:
    return {"role": "user", "content": problem.question}


def _count_tokens(row: dict[str, Any], kind: str, tokenizer: Any) -> int:
    """Of the prompt (``rl``), the whole example, or the longer side of a pair."""
    chats = [
        [*row["messages"], {"role": "assistant", "content": row[side]}]
        for side in ("chosen", "rejected")
        if side in row
    ]
    return max(
        len(tokenizer.apply_chat_template(chat, add_generation_prompt=kind == "rl", return_dict=False))
        for chat in chats or [row["messages"]]
    )
