from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_core.api.configs import TrackerConfig
from areal_core.api.run_api import RunInfo
from areal_core.errors import PluginError
from areal_core.plugins import get_plugin_manager
from areal_core.runs.tensorboard import TensorBoardTracker
from areal_core.runs.trackers import TrackerSet


class Recorder:
    def __init__(self, fail: bool = False) -> None:
        self.fail, self.steps, self.closed = fail, [], 0

    def log(self, step: int, metrics: Any) -> None:
        if self.fail:
            raise ConnectionError("server is down")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(name="r", path=tmp_path, config={}, trainer="rl")


def test_log_when_one_tracker_fails_then_the_others_go_on_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = Recorder(), Recorder(fail=True)
    trackers = TrackerSet([("bad", bad), ("good", good)])

    with caplog.at_level(logging.WARNING, "areal"):
        for step in (1, 2, 3):
            trackers.log(step, {"a": 1.0})
    trackers.close()
    trackers.close()

    assert good.steps == [1, 2, 3]
    assert caplog.messages == ["tracker 'bad' failed to log: ConnectionError: server is down"]
    assert (good.closed, bad.closed) == (1, 1)


def test_from_config_when_the_name_is_unknown_then_error_names_the_key(run: RunInfo) -> None:
    with pytest.raises(PluginError, match=r"trackers\[0\]\.name.*tensorbord.*Did you mean 'tensorboard'"):
        TrackerSet.from_config([TrackerConfig(name="tensorbord")], run, get_plugin_manager())


def test_from_config_when_a_tracker_cannot_start_then_the_run_goes_without_it(
    run: RunInfo, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: RunInfo) -> Any:
        raise ConnectionError("server is down")

    class Manager:
        def load(self, *args: Any, **kwargs: Any) -> Any:
            return broken

    with caplog.at_level(logging.WARNING, "areal"):
        trackers = TrackerSet.from_config([TrackerConfig(name="x")], run, Manager())  # type: ignore[arg-type]
        trackers.log(1, {})

    assert caplog.messages == ["tracker 'x' failed to start: ConnectionError: server is down"]


def test_tensorboard_when_metrics_are_logged_then_the_event_file_has_them(run: RunInfo) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerSet.from_config([TrackerConfig(name="tensorboard")], run, get_plugin_manager())
    trackers.log(1, {"train/loss": 0.5, "bad": float("nan")})
    trackers.log(2, {"train/loss": 0.25})
    trackers.close()

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


def test_tensorboard_when_a_run_resumes_then_later_points_of_the_first_part_are_dropped(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_from, steps in ((0, range(1, 6)), (3, range(4, 7))):
        run = RunInfo(name="r", path=tmp_path, config={}, trainer="rl", resumed_from=resumed_from)
        tracker = TensorBoardTracker(run)
        for step in steps:
            tracker.log(step, {"x": float(resumed_from)})
        tracker.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3)]


def test_tensorboard_when_not_installed_then_error_says_what_to_install(
    run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(PluginError, match=r"pip install 'areal-core\[tensorboard\]'"):
        TensorBoardTracker(run)
