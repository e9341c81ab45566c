"""Options of the dataset: the section `arithmetic` under `train_dataset` and `valid_dataset`."""

from __future__ import annotations

from typing import Any

import attrs

from areal_core.config.fields import option

KINDS = ("add", "sub", "mul", "two")


def _known_kinds(instance: Any, attribute: attrs.Attribute[Any], value: list[str]) -> None:
    unknown = sorted(set(value) - set(KINDS))
    if not value or unknown:
        raise ValueError(f"must be a list of {', '.join(KINDS)}, got {value!r}")


@attrs.define(kw_only=True)
class ArithmeticConfig:
    """Which problems are made. The same options give the same rows on every machine."""

    size: int = option(25600, "Rows of the split.", ge=1)
    max_number: int = option(10, "Largest number in a question; the smallest is 2.", ge=4)
    kinds: list[str] = option(
        factory=lambda: ["add", "two", "two"],
        help="Each row draws one of these: add, sub, mul (one step), two (two steps). Name one twice to draw it more.",
        validator=_known_kinds,
    )
    seed: int = option(0, "Seed of the train split. The test split is the same for every seed.", ge=0)
    sloppy: float = option(0.65, "SFT: share of the two-step demonstrations that stop after one step.", ge=0, le=1)
    no_format: float = option(0.15, "SFT: share of the demonstrations that leave out the answer line.", ge=0, le=1)
    stop_early: float = option(
        0.5,
        "RW, DPO: share of the two-step rejected answers that stop after one step; the others are wrong.",
        ge=0,
        le=1,
    )
