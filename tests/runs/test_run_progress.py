from __future__ import annotations

import contextlib
import io
import logging
import re

import pytest

from areal_core.runs import progress
from areal_core.runs.headline import format_number, format_seconds, headline, sparkline
from areal_core.runs.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_update_when_no_terminal_then_one_line_says_it_all(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "areal")
    bar = Progress(40, initial=10, title="run", live=False)
    metrics = {"rollout/reward": 0.61, "eval/reward": 0.93, "train/loss": 0.0123, "train/tokens": 620, "time/step_s": 2}

    clock.now += 9
    bar.update(11, {"rollout/reward": 0.1})
    clock.now += 2
    bar.update(12, metrics)
    bar.message("saved")
    bar.close()

    assert caplog.messages == [
        "step 11/40  reward 0.1  eta 4:21",
        "step 12/40  reward 0.61  eval 0.93  loss 0.0123  310 tok/s  eta 0:56",
        "saved",
    ]


def test_update_when_a_later_step_lacks_eval_then_its_line_does_not_repeat_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "areal")
    bar = Progress(2, live=False)

    bar.update(1, {"eval/reward": 0.5})
    bar.update(2, {"rollout/reward": float("nan"), "train/loss": 1.0})

    assert "eval 0.5" in caplog.messages[0]
    assert caplog.messages[1] == "step 2/2  loss 1"


def test_update_when_on_a_terminal_then_a_bar_shows_reward_and_sparkline(clock: Clock) -> None:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        bar = Progress(3, title="rl [demo]", live=True)
        for step in (1, 2, 3):
            clock.now += 1
            bar.update(step, {"rollout/reward": step / 4})
        bar.close()
        bar.close()

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "rl [demo]" in text and "3/3" in text and "reward 0.75" in text and "▁▅█" in text


def test_eta_when_the_first_step_is_slow_then_it_does_not_count_twice(clock: Clock) -> None:
    bar = Progress(12, live=False)
    assert bar.eta is None

    clock.now += 100
    bar.update(1, {})
    clock.now += 1
    bar.update(2, {})

    assert bar.eta == pytest.approx(10)
    clock.now += 1
    bar.update(12, {})
    assert bar.eta is None


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"rollout/reward": 1.0, "eval/reward": 2.0}, {"reward": 1.0, "eval": 2.0}),
        ({"custom/reward": 1.0}, {"reward": 1.0}),
        ({"eval/reward": 2.0}, {"eval": 2.0}),
        ({"train/loss": 0.5, "eval/loss": 0.7}, {"loss": 0.5, "eval loss": 0.7}),
        ({"perf/tokens_per_s": 5.0, "train/tokens": 100, "time/step_s": 1}, {"tok/s": 5.0}),
        ({"train/tokens": 100, "time/step_s": 0}, {}),
        ({"train/loss": None, "rollout/reward": float("inf"), "reward": True}, {}),
    ],
)
def test_headline_when_names_vary_then_it_finds_what_matters(metrics: dict, expected: dict) -> None:
    assert headline(metrics) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.61, "0.61"), (-0.01234, "-0.0123"), (1.234e-5, "1.23e-05"), (310.4, "310"), (1234, "1234"), (12500, "12.5k")],
)
def test_format_number_when_small_or_large_then_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (34.4, "0:34"), (725, "12:05"), (10930, "3:02:10"), (183730, "2d 3:02:10")]
)
def test_format_seconds_when_long_then_hours_and_days(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_sparkline_when_constant_or_empty_or_not_finite_then_it_is_drawn() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁█"
    assert sparkline(range(100), width=3) == "▁▅█"
