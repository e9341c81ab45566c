"""Observers of a run: told in order, and never fatal."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from areal_core import hookimpl
from areal_core.plugins import PluginManager


class Recorder:
    def __init__(self, seen: list[tuple[str, int]], name: str) -> None:
        self.seen, self.name = seen, name

    @hookimpl
    def areal_step_finished(self, step: int) -> None:
        self.seen.append((self.name, step))


class Raising:
    @hookimpl
    def areal_step_finished(self, run: Any, step: int) -> None:
        raise RuntimeError(f"step {step}")


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager([])


def test_call_lifecycle_when_one_raises_tells_the_others_and_counts(
    manager: PluginManager, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, int]] = []
    manager.register(Recorder(seen, "a"), "a")
    manager.register(Raising(), "bad")
    manager.register(Recorder(seen, "b"), "b")

    with caplog.at_level(logging.WARNING):
        for step in range(1, 11):
            manager.call_lifecycle("areal_step_finished", run=None, step=step, metrics={})

    assert sorted(seen) == sorted((name, step) for name in "ab" for step in range(1, 11))
    assert manager.lifecycle_errors == {("areal_step_finished", "bad"): 10}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "the first and the tenth failure are logged"
    assert caplog.records[0].exc_info is not None


def test_call_lifecycle_when_interrupted_passes_the_interrupt_on(manager: PluginManager) -> None:
    class Interrupting:
        @hookimpl
        def areal_step_finished(self) -> None:
            raise KeyboardInterrupt

    manager.register(Interrupting(), "x")

    with pytest.raises(KeyboardInterrupt):
        manager.call_lifecycle("areal_step_finished", run=None, step=1, metrics={})


def test_unregister_when_called_stops_telling(manager: PluginManager) -> None:
    seen: list[tuple[str, int]] = []
    recorder = Recorder(seen, "a")
    manager.register(recorder, "a")
    manager.call_lifecycle("areal_step_finished", run=None, step=1, metrics={})

    manager.unregister(recorder)
    manager.call_lifecycle("areal_step_finished", run=None, step=2, metrics={})

    assert seen == [("a", 1)]


def test_call_lifecycle_when_nobody_listens_does_nothing(manager: PluginManager) -> None:
    manager.call_lifecycle("areal_run_finished", run=None, status="finished", error=None)

    assert not manager.lifecycle_errors
