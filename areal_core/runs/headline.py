"""Which of a step's many metrics a person wants to see first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BLOCKS = "▁▂▃▄▅▆▇█"

#: For each headline, the names that may hold it, most telling first. ``*/x`` is any group but ``eval``.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "reward": ("rollout/reward", "train/reward", "reward", "rollout/reward_mean", "*/reward"),
    "eval": ("eval/reward", "eval/accuracy", "eval/reward_mean"),
    "loss": ("train/loss", "actor/loss", "loss", "*/loss"),
    "eval loss": ("eval/loss",),
    "grad": ("train/grad_norm", "actor/grad_norm", "grad_norm", "*/grad_norm"),
    "tok/s": ("perf/tokens_per_s", "train/tokens_per_s", "rollout/tokens_per_s", "tokens_per_s", "*/tokens_per_s"),
}


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _find(metrics: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        if name.startswith("*/"):
            suffix = name[1:]
            candidates = [key for key in metrics if key.endswith(suffix) and not key.startswith("eval/")]
        else:
            candidates = [name] if name in metrics else []
        for key in candidates:
            number = _number(metrics[key])
            if number is not None:
                return number
    return None


def headline(metrics: Mapping[str, Any]) -> dict[str, float]:
    """``reward``, ``eval``, ``loss``, ``eval loss``, ``grad`` and ``tok/s``, as far as the metrics have them."""
    found = {label: _find(metrics, names) for label, names in _NAMES.items()}
    if found["tok/s"] is None:
        tokens = _find(metrics, ("train/tokens", "rollout/tokens", "tokens"))
        seconds = _find(metrics, ("time/step_s",))
        if tokens is not None and seconds:
            found["tok/s"] = tokens / seconds
    return {label: value for label, value in found.items() if value is not None}


def format_number(value: float) -> str:
    """Three significant digits: ``0.61``, ``-0.0123``, ``1.2e-05``, ``310``, ``12.5k``."""
    magnitude = abs(value)
    if magnitude >= 1e6:
        return f"{value / 1e6:.3g}M"
    if magnitude >= 1e4:
        return f"{value / 1e3:.3g}k"
    if magnitude >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """``0:34``, ``12:05``, ``3:02:10``, ``2d 3:02:10``."""
    whole = max(0, round(seconds))
    days, whole = divmod(whole, 86400)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Iterable[float], width: int = 24) -> str:
    """The last values as one line of block characters; a constant series is drawn in the middle."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high == low:
        return _BLOCKS[3] * len(shown)
    return "".join(_BLOCKS[min(7, int((value - low) / (high - low) * 8))] for value in shown)
