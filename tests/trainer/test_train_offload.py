"""Models that give way to each other: who is on the device when, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from trainer_harness import HERE, read_metrics, record_moves, untimed, write_yaml

from areal_core.api.configs import TrainEngineConfig
from areal_core.api.load import load_run_config
from areal_core.stats import StatsTracker
from areal_core.trainer.residency import Residency
from areal_core.trainer.run import train


@attrs.define(eq=False)
class FakeEngine:
    name: str
    log: list[str]

    def offload(self, *, keep_logits: bool = False) -> None:
        self.log.append(f"{self.name} {'keeps logits' if keep_logits else 'goes'}")

    def onload(self) -> None:
        self.log.append(f"{self.name} comes")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def residency(log: list[str]) -> Any:
    """A residency of ``a``, ``b`` and ``c``, of which ``c`` never gives way; also the engines."""
    residency = Residency(StatsTracker())
    engines: list[Any] = [FakeEngine(name, log) for name in "abc"]
    for engine, offload in zip(engines, (True, True, False), strict=True):
        residency.add(engine, TrainEngineConfig(path="x", offload=offload))
    return residency, *engines


def test_add_when_loaded_expected_gone_before_the_next(residency: Any, log: list[str]) -> None:
    assert log == ["a goes", "b goes"]


def test_use_when_another_is_there_expected_it_goes_first_and_nothing_moves_twice(
    residency: Any, log: list[str]
) -> None:
    residency, a, b, c = residency
    log.clear()

    for engine in (a, a, b, c, c, b, b):
        residency.use(engine)
    residency.release()
    residency.release()

    assert log == ["a comes", "a goes", "b comes", "b goes", "b comes", "b goes"]


def test_use_when_logits_of_another_are_wanted_expected_that_much_stays(residency: Any, log: list[str]) -> None:
    residency, a, b, c = residency
    residency.use(a)
    log.clear()

    residency.use(b, logits_of=a)
    residency.use(b, logits_of=a)
    residency.use(c, logits_of=a)
    residency.use(a)

    assert log == ["a keeps logits", "b comes", "b goes", "a comes"]


def test_export_when_something_moved_expected_its_time(residency: Any) -> None:
    residency, a, _, c = residency
    residency.stats.export()

    residency.use(c)
    unmoved = residency.stats.export()
    residency.use(a)

    assert "time/offload_s" not in unmoved
    assert residency.stats.export()["time/offload_s"] > 0


def test_train_when_ppo_models_give_way_expected_the_same_run_and_one_model_at_a_time(
    rl_plain: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrange: an engine that is used while it is away raises, on a CPU too.
    monkeypatch.syspath_prepend(str(HERE))
    model = {"path": str(tiny_model), "dtype": "float32"}
    rl_plain["algorithm"] = {"name": "ppo"}
    rl_plain["actor"] |= {"kl_ctl": 0.05, "ppo_n_minibatches": 2}
    rl_plain["ref"] = model
    rl_plain["critic"] = {**model, "optimizer": {"lr": 1e-3}}
    rl_plain["total_train_steps"] = 2
    rl_plain["evaluation"] = {"freq_steps": 1, "at_start": True}
    rl_plain["checkpoint"] = {"freq_steps": 1, "keep_best": 1, "save_final": True}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    straight = train(load_run_config(path, ["run.name=straight"])).path

    # Act
    moves = record_moves(monkeypatch)
    given = [f"{key}.offload=true" for key in ("actor", "ref", "critic")]
    away = train(load_run_config(path, ["run.name=away", *given])).path

    # Assert
    assert untimed(read_metrics(away)) == untimed(read_metrics(straight))
    assert (away / "weights" / "final" / "model.safetensors").read_bytes() == (
        straight / "weights" / "final" / "model.safetensors"
    ).read_bytes()
    loading = ["actor away", "ref away", "critic away"]
    first_weights = ["actor back", "actor away"]  # then the sampler evaluates
    best = ["actor back", "actor away"]  # exported, then the sampler plays the step
    step = ["ref back", "ref away", "critic back", "critic away", "actor back"]  # one stay for values and learning
    assert moves[: len(loading + first_weights)] == loading + first_weights
    rest = moves[len(loading + first_weights) :]
    # Training states are saved where they are; only an export of weights brings the actor back.
    assert rest[: len(best + step)] == best + step
    present: set[str] = set()
    for move in rest:
        name, _, where = move.partition(" ")
        present = present | {name} if where == "back" else present - {name}
        assert len(present) <= 1, rest
    # It may change on resume.
    resumed = train(load_run_config(path, ["run.name=away", "total_train_steps=3"]), resume="must")
    longer = train(load_run_config(path, ["run.name=straight", *given, "total_train_steps=3"]), resume="must")
    assert untimed(read_metrics(resumed.path)) == untimed(read_metrics(longer.path))
