"""Reading a number as people and models write it: `$1,234.50`, `25%`, `-\\frac{3}{4}`, `1 1/2 cups`, `3 \\times 10^4`.

Values are exact fractions, so that no rounding decides whether an answer is right.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

import attrs

_LONGEST_ANSWER = 400
_LARGEST_EXPONENT = 300
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_LETTERS = frozenset("mghslL")

_CURRENCY = "$€£¥₹"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?:(?P<sign>[-+])\s*)?(?:[{re.escape(_CURRENCY)}]\s*(?:(?P<sign2>[-+])\s*)?)?
    (?:
        (?:(?P<whole>{_DIGITS})\s+)?(?P<numerator>{_DIGITS})\s*/\s*(?P<denominator>{_DIGITS})(?![\d.])
      | (?P<mantissa>{_DECIMAL})
        (?: [eE](?P<exponent>[-+]?\d+) | \s*(?:x|\*|×)\s*10\s*(?:\^|\*\*)\s*(?P<power>[-+]?\d+) )?
    )""",
    re.VERBOSE,
)
# What may stand before a number in an answer: nothing, or words and punctuation that end in a blank, colon or "=".
_BEFORE = re.compile(r"(?:[A-Za-z][A-Za-z' ,]*(?:\s|:|=)\s*)?[≈~=:]*\s*")
_OPERAND = re.compile(r"[A-Za-z]\s*$")
_MINUS_WORD = re.compile(r"(?:minus|negative)\s*$", re.IGNORECASE)
_AFTER = re.compile(r"[A-Za-z\s.,;:!?'\"/()%°€£¥₹$-]*")
_FORMATTING = re.compile(
    r"""\\(?:left|right|displaystyle)\b | \\[!,;:()\[\]]  # LaTeX
    | (?<!\d)\*\* | \*\*(?!\s*[-+]?\d) | ` | __          # Markdown, but not a power
    """,
    re.VERBOSE,
)
_LATEX_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(r"(\d?)\s*\\[dtc]?frac\s*(?:\{\s*([\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))")


@attrs.frozen
class Number:
    """A value, and whether it was written as a percentage (which its value does not take into account)."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Equal values. Of ``25%`` and a bare number, the number may be 25 (as in GSM8K) or 0.25."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percentage, bare = (self, other) if self.percent else (other, self)
        return percentage.value == 100 * bare.value


def normalise(text: str) -> str:
    """Plain characters for typographic ones and for LaTeX that only formats; the reading stays the same."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: f"^{m[0].translate(_SUPERSCRIPTS)}", text)
    text = re.sub("([¼½¾⅐-⅞])", r" \1", text)  # before NFKC, which makes 31⁄2 of 3½
    text = re.sub("(?<=\\d)[\u2009\u202f](?=\\d{3})", "", text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub("[\u2212\u2012-\u2015]", "-", text).replace("\u2044", "/")
    text = re.sub(
        r"\\(?:left|right|displaystyle)\b|\\[!,;:]|\\\(|\\\)|\\\[|\\\]|(?<!\d)\*\*|\*\*(?!\s*[-+]?\d)|`|__", "", text
    )
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\ ", " ").replace("~", " ")
    text = text.replace("\\times", "×").replace("\\cdot", "×").replace("\\approx", "≈").replace("^\\circ", "°")
    text = _LATEX_WRAPPER.sub(r" \1 ", text)
    text = _LATEX_FRACTION.sub(_plain_fraction, text)
    text = re.sub(r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1", text).strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text


def _plain_fraction(match: re.Match[str]) -> str:
    whole = f"{match[1]} " if match[1] else ""
    return f"{whole}{match[2] or match[3]}/{match[4] or match[5]}"


def parse_number(text: str) -> Number | None:
    """The one number that ``text`` states, or None if it states none, several, or an expression.

    Words before it and units after it are left out: ``"Total: $18.00 per day"`` is 18.
    """
    if len(text) > _LONGEST_ANSWER:
        return None
    text = normalise(text)
    if "=" in text:
        text = text.rsplit("=", 1)[1].strip()
    words = _BEFORE.match(text)
    start = words.end() if words is not None else 0
    match = _NUMBER.match(text, start)
    if match is None or not _is_unit(text[match.end() :]):
        return None
    if _OPERAND.search(text, 0, start) is not None and re.match(r"[-+]\s", match[0]) is not None:
        return None  # x - 5 is an expression
    return _number(match, negate=_MINUS_WORD.search(text, 0, start) is not None)


def find_last_number(text: str) -> Number | None:
    """The last number anywhere in ``text``. A minus between two numbers is an operator, not a sign."""
    text = normalise(text)
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    number = _number(last)
    is_operator = last["sign"] == "-" and re.search(r"[\d)%]\s*$", text[: last.start()]) is not None
    return attrs.evolve(number, value=-number.value) if number is not None and is_operator else number


def _number(match: re.Match[str], *, negate: bool = False) -> Number | None:
    value = _value(match)
    if value is None:
        return None
    rest = match.string[match.end() :]
    return Number((-value if negate else value) * _scale(rest), _is_percent(rest))


def _is_unit(rest: str) -> bool:
    """Whether what follows a number is a unit or other words, and no further number or part of an expression."""
    rest = re.sub(r"(?<=[A-Za-z])\^?[23]\b", "", rest)  # cm^2
    if _AFTER.fullmatch(rest) is None:
        return False
    word = rest.strip(" .,;:!?'\"")
    return not (len(word) == 1 and word.isalpha() and word not in _UNIT_LETTERS)  # 2x is an expression


def _value(match: re.Match[str]) -> Fraction | None:
    def integer(name: str) -> int:
        return int((match[name] or "0").replace(",", ""))

    if match["denominator"] is not None:
        if integer("denominator") == 0:
            return None
        value = integer("whole") + Fraction(integer("numerator"), integer("denominator"))
    else:
        exponent = int(match["exponent"] or match["power"] or 0)
        if abs(exponent) > _LARGEST_EXPONENT:
            return None
        value = Fraction(match["mantissa"].replace(",", "")) * Fraction(10) ** exponent
    negative = (match["sign"] == "-") != (match["sign2"] == "-")
    return -value if negative else value


def _scale(rest: str) -> int:
    match = re.match(r"\s*([a-z]+)", rest)
    return _SCALES.get(match[1], 1) if match else 1


def _is_percent(rest: str) -> bool:
    return re.match(r"\s*(?:%|percent\b|per cent\b)", rest) is not None
