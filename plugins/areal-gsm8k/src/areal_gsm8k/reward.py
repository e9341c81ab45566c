"""The reward `gsm8k`."""

from __future__ import annotations

import logging
import re
from typing import Any

from areal_core.logging import getLogger
from areal_gsm8k.numbers import Number, find_last_number, normalise, parse_number

logger = getLogger("GSM8KReward")

_MARK = "####"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPECIAL_TOKEN = re.compile(r"<\|[^<>|]*\|>|</?s>")
_LONGEST_EXPRESSION = 200
# Powers of powers, large powers and factorials: a few characters that take forever to evaluate.
_EXPLOSIVE = re.compile(r"(?:\^|\*\*)[^=]*(?:\^|\*\*)|(?:\^|\*\*)\s*[{(]?\s*[-+]?\d{3,}|!")


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    answer: str,
    *,
    last_number: bool = False,
    **data: Any,
) -> float:
    """1.0 if the completion's final answer equals the reference, else 0.0.

    The final answer is what stands after the last ``####`` or in the last ``\\boxed{}``, whichever comes later. A
    completion with neither scores 0, or with ``last_number`` is judged by its last number. Numbers are compared as
    exact fractions after normalisation (see :mod:`areal_gsm8k.numbers`); the rest goes to math-verify.

    Safe to call in any thread: math-verify's own timeouts, which need the main thread, are off.

    Args:
        prompt, prompt_ids, completion_ids: not used.
        completions: the completion's text.
        answer: the reference: a GSM8K solution with its ``####`` line, or the bare answer.
        last_number: see above.
    """
    reference = extract_answer(str(answer))
    if reference is None:
        reference = str(answer).strip()
    given = extract_answer(completions)
    if given is None:
        number = find_last_number(completions) if last_number else None
        expected = parse_number(reference)
        return float(number is not None and expected is not None and number.equals(expected))
    return float(answers_equal(given, reference))


def extract_answer(text: str) -> str | None:
    """The text of the final answer, or None where no ``####`` and no complete ``\\boxed{}`` has any."""
    text = _SPECIAL_TOKEN.sub("", text)
    marked_at = text.rfind(_MARK)
    boxed_at, boxed = _last_boxed(text)
    if boxed is not None and boxed_at > marked_at:
        return boxed
    lines = text[marked_at + len(_MARK) :].strip().splitlines() if marked_at >= 0 else []
    return lines[0].strip() if lines else boxed


def answers_equal(given: str, reference: str) -> bool:
    """Whether two answers are the same number, the same text, or equal expressions."""
    left, right = parse_number(given), parse_number(reference)
    if left is not None and right is not None:
        return left.equals(right)
    given, reference = normalise(given), normalise(reference)
    if given == reference:
        return bool(given)
    return _expressions_equal(given, reference, right)


def _last_boxed(text: str) -> tuple[int, str | None]:
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return match.start(), text[match.end() : end].strip()
    return -1, None


def _expressions_equal(given: str, reference: str, number: Number | None) -> bool:
    if not given or len(given) > _LONGEST_EXPRESSION or _EXPLOSIVE.search(given):
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, which is meant

    gold = str(number.value) if number is not None else reference
    try:
        # No timeouts: they are made of signals, which only the main thread may use. The run's own limit on a reward
        # (reward.timeout) ends a call that hangs.
        expected = parse(f"${gold}$", parsing_timeout=None)
        found = parse(f"${given}$", parsing_timeout=None)
        return bool(expected and found and verify(expected, found, timeout_seconds=None))
    except Exception as error:
        logger.debug("math-verify could not compare %r with %r: %s", given, reference, error)
        return False
