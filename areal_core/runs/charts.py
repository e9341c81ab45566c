"""Which curves a report draws, and in which chart."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs

#: More points than this are averaged: a chart is a few hundred pixels wide.
MAX_POINTS = 800


@attrs.frozen
class _Chart:
    """A chart takes every metric that one of its patterns matches entirely.

    Attributes:
        note: one sentence that says how to read it.
        unit: ``""``, ``"s"`` or ``"%"`` (a share from 0 to 1).
        idle: worth a place among the first charts even when all its values are 0.
    """

    title: str
    patterns: tuple[str, ...]
    note: str = ""
    unit: str = ""
    idle: bool = True


#: A series of the report's own, where the metrics have none such.
_DERIVED = "trained tokens per second"

_CHARTS = (
    _Chart(
        "Reward",
        (r"(rollout|train|eval)/reward", "rollout/reward_unfiltered", "reward"),
        "Mean over the step's samples; unfiltered: also of groups that did not enter the batch.",
    ),
    _Chart(
        "Named rewards",
        (r"(rollout|eval)/reward/(?!(?:calls|seconds)$)[^/]+",),
        "What the reward is the sum of, without weights; means.",
    ),
    _Chart(
        "Reward spread",
        (r"rollout/reward_std(/[^/]+)?",),
        "Deviation over all samples of a step; 0 leaves nothing to learn.",
    ),
    _Chart("Loss", (r"(train|actor|eval|critic)/loss", r"(train|actor)/policy_loss", "loss")),
    _Chart(
        "KL",
        (r"(train|actor)/(approx_kl|prox_kl|ref_kl|kl)",),
        "approx_kl: to the sampler; prox_kl: to the policy before the step; ref_kl: to the reference model.",
    ),
    _Chart(
        "Clip fraction",
        (r"(train|actor)/(dual_)?clip_fraction(_low|_high)?", r"(train|actor)/behave_(dropped|clamped)_fraction"),
        "Share of tokens whose gradient the clip removes, by side; or whose importance weight is beyond a bound.",
        "%",
    ),
    _Chart("Entropy", (r"(train|actor)/entropy",), "Nats per token."),
    _Chart(
        "Sampler against trainer",
        (r"(train|actor)/logprob_gap(_max)?",),
        "Log-prob difference on the same tokens, mean and largest; 0 but for rounding.",
    ),
    _Chart(
        "Probability ratio",
        (r"(train|actor)/(ratio|behave_ratio|behave_weight)",),
        "New over old policy, and proximal over behaviour before and after its bounds; 1 means equal.",
    ),
    _Chart("Completion length", (r"(rollout|eval)/completion_len",), "Mean tokens."),
    _Chart("Truncated", (r"(rollout|eval)/truncated",), "Share of completions that hit the length limit.", "%"),
    _Chart("Gradient norm", (r"(train|actor|critic)/grad_norm", "grad_norm"), "Before clipping."),
    _Chart("Learning rate", (r"(train|actor|critic)/lr", "lr")),
    _Chart(
        "Throughput",
        (_DERIVED, r".*tokens_per_s(econd)?"),
        "Of a whole step, prompts included; the engine's own beside it.",
    ),
    _Chart("Time", (r"time/.*_s",), "Seconds of a step, by phase.", "s"),
    _Chart("Staleness", (r"rollout/version_lag_(mean|max)",), "Versions between sampling and training.", idle=False),
    _Chart(
        "Lost episodes",
        (r"rollout/(rejected|failed|cancelled|retries)",),
        "Episodes of a step that gave no sample, and repeated tries.",
        idle=False,
    ),
    _Chart(
        "Filtered groups", (r"rollout/(filtered|stale|incomplete)_groups",), "Played, but not trained on.", idle=False
    ),
    _Chart("Reward errors", (r"(eval/)?reward/(\w+/)?errors/\w+",), "Calls of a reward that gave no number, by kind."),
    _Chart("Value function", (r"(train|critic)/value_(error|loss|clip_fraction)", r"critic/.*")),
)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(f"{value:.5g}")
    return None


def _thin(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most ``MAX_POINTS`` points: means over equal stretches, placed at the last step of each."""
    stride = math.ceil(len(steps) / MAX_POINTS)
    if stride <= 1:
        return steps, values
    thin_steps, thin_values = [], []
    for start in range(0, len(steps), stride):
        part = values[start : start + stride]
        thin_steps.append(steps[min(start + stride, len(steps)) - 1])
        thin_values.append(float(f"{sum(part) / len(part):.5g}"))
    return thin_steps, thin_values


def _collect(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    series: dict[str, tuple[list[int], list[float]]] = {}

    def add(name: str, step: int, value: Any) -> None:
        number = _number(value)
        if number is not None:
            steps, values = series.setdefault(name, ([], []))
            steps.append(step)
            values.append(number)

    explicit = any(name.endswith("tokens_per_s") and not name.startswith("engine/") for row in rows for name in row)
    for row in rows:
        step = int(row["step"])
        for name, value in row.items():
            if name not in ("step", "time"):
                add(name, step, value)
        tokens, seconds = _number(row.get("train/tokens")), _number(row.get("time/step_s"))
        if not explicit and tokens is not None and seconds:
            add(_DERIVED, step, tokens / seconds)
    return series


def arrange_charts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The charts of a run.

    Returns:
        ``axes``: lists of steps; ``charts``: ``{title, note, unit, main, series: [[name, axis index, values]]}``, the
        known ones first, then one for every other metric (``main`` is false).
    """
    series = _collect(rows)
    axes: list[list[int]] = []
    axis_of: dict[tuple[int, ...], int] = {}

    def packed(name: str) -> list[Any]:
        steps, values = _thin(*series[name])
        key = tuple(steps)
        if key not in axis_of:
            axis_of[key] = len(axes)
            axes.append(steps)
        return [name, axis_of[key], values]

    charts: list[dict[str, Any]] = []
    used: set[str] = set()
    for chart in _CHARTS:
        names = [
            name
            for pattern in chart.patterns
            for name in sorted(series)
            if name not in used and re.fullmatch(pattern, name)
        ]
        names = list(dict.fromkeys(names))
        if not names or not (chart.idle or any(any(series[name][1]) for name in names)):
            continue
        used |= set(names)
        # Training curves below, the sparse held-out ones drawn on top.
        names.sort(key=lambda name: name.startswith("eval/"))
        charts.append(
            {
                "title": chart.title,
                "note": chart.note,
                "unit": chart.unit,
                "main": True,
                "series": [packed(name) for name in names],
            }
        )
    for name in sorted(series.keys() - used):
        charts.append({"title": name, "note": "", "unit": "", "main": False, "series": [packed(name)]})
    return {"axes": axes, "charts": charts}
