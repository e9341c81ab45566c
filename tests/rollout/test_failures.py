"""When failures stop a run: the episodes that they are counted over, and the bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.api.configs import InferenceEngineConfig
from areal_core.rollout.failures import FailureWatch


def stops_at(failed: list[bool], rate: float, episodes_per_batch: int) -> int | None:
    """After how many episodes the run stops."""
    watch = FailureWatch(InferenceEngineConfig(max_failure_rate=rate), episodes_per_batch, lambda: None)
    for number, bad in enumerate(failed, 1):
        watch.count("failed" if bad else "accepted")
        if watch.fatal is not None:
            return number
    return None


@settings(deadline=None)
@given(
    failed=st.lists(st.booleans(), max_size=40),
    rate=st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0]),
    window=st.sampled_from([1, 4, 8, 16]),
)
def test_run_when_episodes_fail_stops_as_soon_as_more_of_the_last_ones_did_than_may(failed, rate, window):
    expected = next(
        (n for n in range(window, len(failed) + 1) if sum(failed[n - window : n]) > rate * window),
        None,
    )

    assert stops_at(failed, rate, window) == expected


def test_run_when_the_batch_is_large_counts_the_last_hundred():
    failed = [True] * 60 + [False] * 40

    assert stops_at(failed, 0.5, 5000) == 100
    assert stops_at([False, *failed], 0.625, 5000) is None


def test_run_when_the_last_episode_of_a_batch_is_the_good_one_stops_all_the_same():
    assert stops_at([True] * 7 + [False], 0.5, 8) == 8
