"""The parts of the trainers: pruning, checkpoints, signals, the loop, configuration checks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_harness import write_yaml

from areal_core.algorithms.grpo import GRPO
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import CheckpointConfig, EvaluationConfig, InferenceEngineConfig, PPOActorConfig
from areal_core.api.io_struct import SaveLoadMeta
from areal_core.api.load import load_run_config
from areal_core.errors import ArealError, BadInputError, ConfigError
from areal_core.runs.run_dir import RunDirectory, list_checkpoints
from areal_core.stats import StatsTracker
from areal_core.trainer.checkpoint import Checkpointer
from areal_core.trainer.checks import check_run
from areal_core.trainer.loop import run_loop
from areal_core.trainer.rl import _without_zero_advantage
from areal_core.trainer.run import train
from areal_core.trainer.signals import Interrupted, StopSignal
from areal_core.trainer.world import ShardRouter, World, check_same_shards


def packed(lengths: list[int], **tokens: Any) -> PackedBatch:
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedBatch(cu_seqlens, {"input_ids": torch.arange(total), **tokens})


# ------------------------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean"])
def test_without_zero_advantage_keeps_the_gradient(loss_agg: str) -> None:
    # Arrange: five ragged sequences; the second and fourth have no advantage.
    torch.manual_seed(0)
    lengths = [4, 3, 6, 2, 5]
    total = sum(lengths)
    mask = torch.rand(total) > 0.3
    advantages = torch.cat([torch.full((n,), a) for n, a in zip(lengths, [1.0, 0.0, -2.0, 0.0, 0.5], strict=True)])
    batch = packed(lengths, loss_mask=mask, advantages=advantages, logprobs=torch.randn(total))
    algorithm = GRPO(PPOActorConfig(path="m", loss_agg=loss_agg))
    batch = batch.with_rows(loss_weights=algorithm.row_weights(batch), group_ids=torch.arange(5))
    logprobs = (batch["logprobs"] + 0.05 * torch.randn(total)).requires_grad_()

    def gradient(part: PackedBatch) -> torch.Tensor:
        picked = logprobs[part["input_ids"]]
        loss = algorithm.loss(TokenOutput(picked), part).loss / algorithm.loss_weight(part)
        return torch.autograd.grad(loss, logprobs)[0]

    # Act
    pruned, skipped = _without_zero_advantage(batch)

    # Assert
    assert skipped == 2 and pruned.num_seqs == 3
    torch.testing.assert_close(gradient(pruned), gradient(batch), rtol=1e-6, atol=1e-7)


def test_without_zero_advantage_when_nothing_is_left_gives_an_empty_batch() -> None:
    # Arrange
    batch = packed([2, 3], loss_mask=torch.ones(5, dtype=torch.bool), advantages=torch.zeros(5))
    batch = batch.with_rows(loss_weights=torch.tensor([2.0, 3.0]))

    # Act
    pruned, skipped = _without_zero_advantage(batch)

    # Assert
    assert skipped == 2 and pruned.num_seqs == 0


def test_shard_router_when_alone_returns_values_to_their_places() -> None:
    # Arrange
    engine = SimpleNamespace(data_parallel_rank=0, data_parallel_world_size=1, device="meta")  # nothing goes there
    router = ShardRouter(World(0, 1, None), engine)  # type: ignore[arg-type]
    batch = packed([2, 3, 1])
    parts = [[2, 0, 1]]

    # Act
    shard = router.scatter(batch, parts)
    gathered = router.gather(shard["input_ids"].float() * 10, batch, parts)

    # Assert
    assert shard["input_ids"].tolist() == [5, 0, 1, 2, 3, 4]
    assert gathered is not None and gathered.tolist() == [0, 10, 20, 30, 40, 50]


def test_shard_router_when_rollouts_are_ragged_balances_tokens_and_keeps_groups_whole() -> None:
    # Arrange: pairs of 60, 4, 56, 4, 4 and 4 tokens, so that neither halves nor every second one are balanced.
    engine = SimpleNamespace(data_parallel_rank=0, data_parallel_world_size=2)
    router = ShardRouter(World(0, 1, None), engine)  # type: ignore[arg-type]
    lengths = [29, 31, 1, 3, 27, 29, 2, 2, 3, 1, 2, 2]
    batch = packed(lengths).with_rows(group_ids=torch.arange(6).repeat_interleave(2))

    # Act
    parts = router.partition(batch, 0.0)

    # Assert
    assert parts is not None and sorted(i for part in parts for i in part) == list(range(12))
    assert all(sorted(part[::2]) == [i - 1 for i in sorted(part[1::2])] for part in parts)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [64, 68]


def test_same_shards_when_meshes_differ_names_the_key() -> None:
    actor, ref = (SimpleNamespace(data_parallel_rank=0, data_parallel_world_size=n) for n in (2, 1))
    check_same_shards(World(0, 1, None), actor, actor, key="ref.backend")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"over 1 data-parallel ranks, but actor\.backend over 2") as caught:
        check_same_shards(World(0, 1, None), actor, ref, key="ref.backend")  # type: ignore[arg-type]
    assert caught.value.key == "ref.backend"


# --------------------------------------------------------------------------------------------------- checkpoints


class FakeEngine:
    """Saves a number, so that a checkpoint can be told from another."""

    def __init__(self) -> None:
        self.value = 0
        self.broken = self.fails_late = self.is_saving = False

    def save(self, meta: SaveLoadMeta) -> None:
        if self.broken:
            raise OSError("No space left on device")
        meta.path.mkdir(parents=True, exist_ok=True)
        self.is_saving = meta.background
        self.copy = (meta.path, self.value)
        if not meta.background:
            self.write()

    def write(self) -> None:
        """What an engine's thread does."""
        path, value = self.copy
        (path / "value").write_text(str(value))
        self.is_saving = False

    def finish_saving(self) -> None:
        if self.is_saving:
            self.write()
        if self.fails_late:
            raise ArealError("No space left on device")

    def load(self, meta: SaveLoadMeta) -> None:
        self.value = int((meta.path / "value").read_text())


@pytest.fixture
def make_checkpointer(tmp_path: Path) -> Callable[..., tuple[Checkpointer, FakeEngine]]:
    directory = RunDirectory.open({"trainer": "rl"}, tmp_path / "run", resume="auto")
    session: Any = SimpleNamespace(directory=directory, checkpoint_saved=lambda step, path: None)

    def make(**config: Any) -> tuple[Checkpointer, FakeEngine]:
        engine = FakeEngine()
        checkpointer = Checkpointer(
            CheckpointConfig(**config),
            tmp_path / "run",
            World(0, 1, None),
            session,
            {"actor": engine},  # type: ignore[dict-item]
            None,
            default_metric="eval/reward",
        )
        return checkpointer, engine

    yield make  # type: ignore[misc]
    directory.close()


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_save_when_keep_last_is_two_removes_older_ones(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_last=2)

    # Act
    for step in (1, 2, 3):
        engine.value = step * 10
        checkpointer.save(step, {"version": step})

    # Assert
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002", "step-000003"]


def test_save_when_async_appears_only_when_the_engine_has_written_it(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(async_save=True)
    engine.value = 10
    checkpointer.save(1, {"version": 1})
    checkpointer.finish()

    # Act: the value changes after the copy was taken.
    engine.value = 20
    checkpointer.save(2, {"version": 2})
    engine.value = 30
    checkpointer.poll()
    before = list_checkpoints(tmp_path / "run")
    engine.write()
    checkpointer.poll()

    # Assert
    assert [step for step, _ in before] == [1]
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [2]
    assert checkpointer.restore() == {"step": 2, "version": 2} and engine.value == 20


def test_save_when_async_and_the_one_before_is_not_done_waits_for_it(make_checkpointer: Any, tmp_path: Path) -> None:
    checkpointer, engine = make_checkpointer(async_save=True, keep_last=2)

    for step in (1, 2):
        engine.value = step
        checkpointer.save(step, {"version": step})
    checkpointer.finish()

    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [1, 2]


def test_finish_when_the_background_save_fails_keeps_the_one_before(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(async_save=True)
    engine.value = 10
    checkpointer.save(1, {"version": 1})
    checkpointer.finish()
    checkpointer.save(2, {"version": 2})
    engine.fails_late = True

    # Act
    with pytest.raises(
        ArealError, match=r"step 2 could not be written.*No space left.*step-000001 is the last complete"
    ):
        checkpointer.finish()

    # Assert: nothing is left of it, and the run goes on from the one before.
    assert names(tmp_path / "run" / "checkpoints") == ["step-000001"]
    engine.fails_late = False
    assert checkpointer.restore() == {"step": 1, "version": 1}


def test_restore_loads_the_newest_checkpoint_and_its_trainer_state(make_checkpointer: Any) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_last=2)
    for step in (1, 2):
        engine.value = step * 10
        checkpointer.save(step, {"version": step})
    engine.value = -1

    # Act
    state = checkpointer.restore()

    # Assert
    assert state == {"step": 2, "version": 2} and engine.value == 20


def test_restore_when_nothing_was_saved_returns_none(make_checkpointer: Any) -> None:
    checkpointer, _ = make_checkpointer()

    assert checkpointer.restore() is None


def test_save_when_the_disk_is_full_leaves_the_last_checkpoint(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer()
    engine.value = 10
    checkpointer.save(1, {})
    engine.broken = True

    # Act
    with pytest.raises(ArealError, match=r"step 2 could not be written.*No space left.*step-000001"):
        checkpointer.save(2, {})

    # Assert
    engine.broken, engine.value = False, -1
    assert names(tmp_path / "run" / "checkpoints") == ["step-000001"]
    assert checkpointer.restore() == {"step": 1} and engine.value == 10


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": null}'])
def test_restore_when_trainer_json_is_damaged_names_the_checkpoint(
    make_checkpointer: Any, tmp_path: Path, text: str
) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer()
    checkpointer.save(1, {})
    (tmp_path / "run" / "checkpoints" / "step-000001" / "trainer.json").write_text(text)
    engine.value = -1

    # Act / Assert
    with pytest.raises(BadInputError, match=r"step-000001: this checkpoint cannot be read .* Remove the folder"):
        checkpointer.restore()
    assert engine.value == -1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "trainer.json holds no 'version'"),
        ({"version": "x"}, "trainer.json: invalid literal for int"),
        ({"version": None}, "trainer.json: int"),
    ],
)
def test_reading_when_the_state_lacks_something_names_the_checkpoint(
    make_checkpointer: Any, state: dict[str, Any], reason: str
) -> None:
    # Arrange
    checkpointer, _ = make_checkpointer()
    checkpointer.save(1, state)
    restored = checkpointer.restore()

    # Act / Assert
    with pytest.raises(BadInputError) as caught, checkpointer.reading():
        int(restored["version"])
    assert f"step-000001: this checkpoint cannot be read ({reason}" in str(caught.value)


def test_restore_when_an_engine_cannot_read_its_state_says_what_to_do(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer()
    checkpointer.save(1, {})

    def load(meta: Any) -> None:
        raise BadInputError(f"{meta.path}: is torn.")

    engine.load = load

    # Act / Assert
    with pytest.raises(BadInputError, match=r"step-000001: .*actor: is torn\)\. Remove the folder"):
        checkpointer.restore()


def test_keep_if_best_keeps_the_best_and_of_equal_ones_the_earlier(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_best=2)

    # Act
    for step, reward in ((1, 0.5), (2, 0.9), (3, 0.4), (4, 0.9), (5, 0.5)):
        checkpointer.keep_if_best(step, {"eval/reward": reward}, engine)
    checkpointer.keep_if_best(6, {"train/loss": 0.0}, engine)
    checkpointer.keep_if_best(7, {"eval/reward": float("nan")}, engine)

    # Assert
    assert names(tmp_path / "run" / "weights") == ["step-000002", "step-000004"]
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["best"] == [[2, 0.9], [4, 0.9]]


def test_keep_if_best_when_metric_is_a_loss_keeps_the_lowest(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_best=1, metric="eval/loss")

    # Act
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4)):
        checkpointer.keep_if_best(step, {"eval/loss": loss}, engine)

    # Assert
    assert names(tmp_path / "run" / "weights") == ["step-000002"]


def test_keep_if_best_when_mode_is_given_keeps_by_it(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange: by its name alone a reward would be kept where it is highest.
    checkpointer, engine = make_checkpointer(keep_best=1, metric="eval/reward/length", mode="min")

    # Act
    for step, reward in ((1, 0.5), (2, 0.3), (3, 0.4)):
        checkpointer.keep_if_best(step, {"eval/reward/length": reward}, engine)

    # Assert
    assert names(tmp_path / "run" / "weights") == ["step-000002"]


def test_keep_if_best_when_the_first_is_nan_keeps_nothing_and_ranks_the_next(
    make_checkpointer: Any, tmp_path: Path
) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_best=2)

    # Act
    for step, reward in ((1, float("nan")), (2, 0.1), (3, float("inf"))):
        checkpointer.keep_if_best(step, {"eval/reward": reward}, engine)

    # Assert
    assert names(tmp_path / "run" / "weights") == ["step-000002"]


def test_keep_if_best_when_a_step_is_done_again_ranks_its_last_value_alone(
    make_checkpointer: Any, tmp_path: Path
) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer(keep_best=2)

    # Act
    for step, reward in ((1, 0.5), (2, 0.9), (2, 0.2)):
        checkpointer.keep_if_best(step, {"eval/reward": reward}, engine)

    # Assert
    assert json.loads((tmp_path / "run" / "state.json").read_text())["best"] == [[1, 0.5], [2, 0.2]]


def test_restore_when_later_steps_were_ranked_forgets_them(make_checkpointer: Any, tmp_path: Path) -> None:
    # Arrange: the run ended after step 2 was ranked, and before its checkpoint.
    checkpointer, engine = make_checkpointer(keep_best=2)
    checkpointer.keep_if_best(1, {"eval/reward": 0.5}, engine)
    checkpointer.save(1, {})
    checkpointer.keep_if_best(2, {"eval/reward": 0.9}, engine)

    # Act
    checkpointer.restore()

    # Assert
    assert json.loads((tmp_path / "run" / "state.json").read_text())["best"] == [[1, 0.5]]


def test_save_when_the_step_is_the_restored_one_writes_nothing(make_checkpointer: Any) -> None:
    # Arrange: an interruption before the first new step.
    make_checkpointer()[0].save(1, {"version": 1})
    resumed, engine = make_checkpointer()
    resumed.restore()
    engine.broken = True

    # Act / Assert: a second write would fail.
    resumed.save(1, {"version": 1})
    assert resumed.restore() == {"step": 1, "version": 1}


def test_save_and_restore_expected_optimizer_state_too(make_checkpointer: Any) -> None:
    # Arrange
    checkpointer, engine = make_checkpointer()
    metas: list[SaveLoadMeta] = []
    save, load = engine.save, engine.load
    engine.save = lambda meta: (metas.append(meta), save(meta))
    engine.load = lambda meta: (metas.append(meta), load(meta))

    # Act
    checkpointer.save(1, {})
    checkpointer.restore()

    # Assert
    assert [(meta.weight_format, meta.with_optim) for meta in metas] == [("dcp", True)] * 2


def test_due_when_saved_counts_seconds_from_then(make_checkpointer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrange
    now = [100.0]
    monkeypatch.setattr("areal_core.trainer.checkpoint.time.monotonic", lambda: now[0])
    checkpointer, _ = make_checkpointer(freq_secs=60)

    # Act
    now[0] += 61
    checkpointer.save(1, {})
    now[0] += 59

    # Assert
    assert not checkpointer.due(2)
    now[0] += 1
    assert checkpointer.due(2)


def test_due_follows_steps_and_seconds(make_checkpointer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrange
    now = [100.0]
    monkeypatch.setattr("areal_core.trainer.checkpoint.time.monotonic", lambda: now[0])
    by_step, _ = make_checkpointer(freq_steps=3)
    by_time, _ = make_checkpointer(freq_secs=60)
    never, _ = make_checkpointer()

    # Act / Assert
    assert [by_step.due(step) for step in (1, 2, 3, 6)] == [False, False, True, True]
    assert not by_time.due(1)
    now[0] += 61
    assert by_time.due(2)
    assert not never.due(10)


# ------------------------------------------------------------------------------------------------------- signals


def test_stop_signal_when_signalled_once_is_true_and_restores_handlers() -> None:
    # Arrange
    before = signal.getsignal(signal.SIGTERM)

    # Act
    with StopSignal() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        after = stop()

    # Assert
    assert after and stop.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """As in a terminal; a shell's background job inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_stop_signal_when_signalled_twice_acts_at_once(ctrl_c_raises: None) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignal():  # noqa: PT012 - the second signal raises
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


# ------------------------------------------------------------------------------------------------------ the loop


class FakeTrainer:
    """Counts its steps; asks to stop before a given one."""

    metric = "eval/reward"
    tokenizer = None

    def __init__(self, total_steps: int, stop_before: int | None = None) -> None:
        self.total_steps = total_steps
        self.stop_before = stop_before
        self.stats = StatsTracker()
        self.engines = {"actor": FakeEngine()}
        self.steps: list[int] = []
        self.evaluated: list[int] = []

    def load_state(self, state: Any) -> None:
        self.steps = list(state["steps"])

    def start(self) -> None: ...

    def train_step(self, step: int) -> bool:
        if step == self.stop_before:
            return False
        self.steps.append(step)
        return True

    def evaluate(self, step: int) -> bool:
        self.evaluated.append(step)
        return True

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def close(self) -> None: ...


class FakeCheckpointer:
    def __init__(self, restored: dict[str, Any] | None = None, freq: int | None = None) -> None:
        self.restored, self.freq = restored, freq
        self.saved: list[tuple[int, Any]] = []
        self.exported: list[str] = []

    def restore(self) -> dict[str, Any] | None:
        return self.restored

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def due(self, step: int) -> bool:
        return self.freq is not None and step % self.freq == 0

    def save(self, step: int, state: Any) -> None:
        self.saved.append((step, {**state}))

    def poll(self) -> None: ...

    def finish(self) -> None: ...

    def export(self, name: str, engine: Any) -> None:
        self.exported.append(name)

    def keep_if_best(self, step: int, metrics: Any, engine: Any) -> None: ...


def loop(
    trainer: FakeTrainer,
    checkpointer: FakeCheckpointer,
    stop: StopSignal | None = None,
    session: Any = None,
    **evaluation: Any,
) -> None:
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(**evaluation), checkpoint=CheckpointConfig())
    run_loop(trainer, config, World(0, 1, None), session, checkpointer, stop or StopSignal())  # type: ignore[arg-type]


def test_run_loop_evaluates_and_saves_when_due_and_at_the_end() -> None:
    # Arrange
    trainer, checkpointer = FakeTrainer(5), FakeCheckpointer(freq=2)

    # Act
    loop(trainer, checkpointer, at_start=True, freq_steps=3)

    # Assert
    assert trainer.steps == [1, 2, 3, 4, 5]
    assert trainer.evaluated == [0, 3, 5]
    assert [step for step, _ in checkpointer.saved] == [2, 4, 5]
    assert checkpointer.exported == ["final"]


def test_run_loop_when_resumed_goes_on_after_the_checkpoint() -> None:
    # Arrange
    trainer = FakeTrainer(5)
    checkpointer = FakeCheckpointer(restored={"step": 3, "steps": [1, 2, 3]})

    # Act
    loop(trainer, checkpointer, at_start=True)

    # Assert: nothing is repeated, and the evaluation of the start is not either.
    assert trainer.steps == [1, 2, 3, 4, 5]
    assert trainer.evaluated == [5]


@pytest.mark.parametrize(("restored", "kept"), [(0, []), (2, [0, 1, 2])])
def test_run_loop_when_resumed_keeps_the_lines_that_are_not_made_again(
    restored: int, kept: list[int], tmp_path: Path
) -> None:
    # Arrange: step 0 is the evaluation of the start.
    directory = RunDirectory.open({}, tmp_path / "run", resume="never")
    for step in (0, 1, 2, 3):
        directory.log_metrics(step, {"x": 1.0})
    left: list[int] = []

    def start_progress(total: int) -> None:
        left.extend(line["step"] for line in map(json.loads, (directory.path / "metrics.jsonl").open()))

    session = SimpleNamespace(directory=directory, start_progress=start_progress, log_step=lambda step, metrics: None)

    # Act
    loop(
        FakeTrainer(4),
        FakeCheckpointer(restored={"step": restored, "steps": []}),
        session=session,
        at_start=True,
    )

    # Assert
    assert left == kept
    directory.close()


def test_run_loop_when_interrupted_in_a_step_saves_the_one_before() -> None:
    # Arrange: the signal arrives within step 3, which then changes nothing.
    trainer, checkpointer, stop = FakeTrainer(5, stop_before=3), FakeCheckpointer(), StopSignal()
    plain_step = trainer.train_step

    def step(number: int) -> bool:
        stop.signum = signal.SIGTERM if number == 3 else None
        return plain_step(number)

    trainer.train_step = step  # type: ignore[method-assign]

    # Act
    with pytest.raises(Interrupted) as raised:
        loop(trainer, checkpointer, stop)

    # Assert
    assert raised.value.signum == signal.SIGTERM
    assert [number for number, _ in checkpointer.saved] == [2]


@pytest.mark.parametrize(("total", "raises"), [(5, True), (3, False)])
def test_run_loop_when_signalled_after_a_step_saves_it_and_stops_unless_it_is_the_last(
    total: int, raises: bool
) -> None:
    # Arrange: the signal arrives at the end of step 3, which is done.
    trainer, checkpointer, stop = FakeTrainer(total), FakeCheckpointer(), StopSignal()
    plain_step = trainer.train_step

    def step(number: int) -> bool:
        done = plain_step(number)
        stop.signum = signal.SIGINT if number == 3 else None
        return done

    trainer.train_step = step  # type: ignore[method-assign]

    # Act
    with pytest.raises(Interrupted) if raises else contextlib.nullcontext():
        loop(trainer, checkpointer, stop)

    # Assert
    assert trainer.steps == [1, 2, 3]
    assert [number for number, _ in checkpointer.saved] == [3]
    assert checkpointer.exported == ([] if raises else ["final"])


def test_run_loop_ranks_the_evaluation_of_the_start_and_of_every_step() -> None:
    # Arrange
    trainer, checkpointer = FakeTrainer(3), FakeCheckpointer()
    ranked: list[int] = []
    checkpointer.keep_if_best = lambda step, metrics, engine: ranked.append(step)  # type: ignore[method-assign]

    # Act
    loop(trainer, checkpointer, at_start=True, at_end=False)

    # Assert
    assert trainer.evaluated == [0]
    assert ranked == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------------- world


def test_world_when_rank_0_plays_long_episodes_has_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrange
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")

    # Act
    try:
        group: Any = World.from_environment().group
        patience = group._get_backend(torch.device("cpu")).options._timeout
    finally:
        dist.destroy_process_group()

    # Assert: torch's default is half an hour, and one episode may take that long.
    assert patience.total_seconds() > 24 * InferenceEngineConfig().episode_timeout


# -------------------------------------------------------------------------------------------------------- checks


def test_check_run_when_processes_do_not_fit_names_the_fix(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), ["actor.backend=fsdp:d3"])

    # Act / Assert
    with pytest.raises(BadInputError, match=r"actor\.backend: d3 needs 3 processes, but 2 are running\. Use d2"):
        check_run(config, world_size=2)


def test_check_run_when_the_model_folder_is_missing_names_the_key(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [f"actor.path={tmp_path / 'none'}"])

    # Act / Assert
    with pytest.raises(ConfigError, match=r"actor\.path"):
        check_run(config, world_size=1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.path={tmp}/runs/sft/weights/final", r"actor\.path: no model at .* run that one first"),
        ("actor.backend=fsdp:d3", r"actor\.backend: d3 needs 3 processes"),
        ("gconfig.temperature=0", r"gconfig\.temperature"),
    ],
)
def test_train_when_the_configuration_cannot_work_leaves_no_run_directory(
    override: str, message: str, rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [override.format(tmp=tmp_path)])

    # Act / Assert
    with pytest.raises(BadInputError, match=message):
        train(config)
    assert not config.run.path.exists()
