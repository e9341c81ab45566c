"""What a trainer hands to its engines in every step: batches, losses, weights, schedules and versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from trainer_harness import HERE, read_metrics, write_yaml
from transformers import AutoTokenizer

from areal_arithmetic.dataset import get_arithmetic_dataset
from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.load import load_run_config
from areal_core.data.loader import DataLoader
from areal_core.trainer.distill import DistillTrainer
from areal_core.trainer.run import train
from areal_fsdp.engine import FSDPEngine


@attrs.frozen(eq=False)
class Update:
    """One optimizer step that was asked for, and what came of it."""

    role: str
    batch: PackedBatch
    loss_fn: Any
    weight_fn: Any
    result: dict[str, float]


@attrs.frozen
class Record:
    calls: list[str] = attrs.field(factory=list)
    updates: list[Update] = attrs.field(factory=list)

    def of(self, role: str) -> list[Update]:
        return [update for update in self.updates if update.role == role]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Of every train engine from now on."""
    monkeypatch.syspath_prepend(str(HERE))
    kept = Record()
    train_batch, schedule, send = FSDPEngine.train_batch, FSDPEngine.lr_scheduler_step, FSDPEngine.update_weights

    def record_train(self: Any, batch: PackedBatch, loss_fn: Any, weight_fn: Any, **options: Any) -> dict[str, float]:
        result = train_batch(self, batch, loss_fn, weight_fn, **options)
        kept.updates.append(Update(self.role, batch, loss_fn, weight_fn, result))
        kept.calls.append(f"{self.role} update")
        return result

    def record_schedule(self: Any) -> None:
        schedule(self)
        kept.calls.append(f"{self.role} schedule")

    def record_send(self: Any, meta: Any) -> None:
        send(self, meta)
        kept.calls.append(f"{self.role} sends version {meta.version}")

    monkeypatch.setattr(FSDPEngine, "train_batch", record_train)
    monkeypatch.setattr(FSDPEngine, "lr_scheduler_step", record_schedule)
    monkeypatch.setattr(FSDPEngine, "update_weights", record_send)
    return kept


@pytest.fixture
def ppo_plain(rl_plain: dict[str, Any], tiny_model: Path) -> dict[str, Any]:
    """Completions of equal lengths, so that mini-batches balance without splitting a group."""
    rl_plain |= {"algorithm": {"name": "ppo"}, "total_train_steps": 2}
    rl_plain["gconfig"] |= {"ignore_eos": True}
    rl_plain["actor"] |= {"ppo_n_minibatches": 2}
    rl_plain["critic"] = {
        "path": str(tiny_model),
        "dtype": "float32",
        "optimizer": {"lr": 1e-3},
        "value_eps_clip": 0.1,
        "value_loss_coef": 0.7,
    }
    return rl_plain


def run(plain: dict[str, Any], tmp_path: Path) -> list[dict[str, Any]]:
    return read_metrics(train(load_run_config(write_yaml(tmp_path / "run.yaml", plain), [])).path)


def test_ppo_when_models_differ_in_mini_batches_expected_their_own_and_one_schedule_step_each(
    ppo_plain: dict[str, Any], record: Record, tmp_path: Path
) -> None:
    # Act
    metrics = run(ppo_plain, tmp_path)

    # Assert: the sampler starts from version 0; every step makes the next one, however many updates it takes.
    step = ["critic update", "critic schedule", "actor update", "actor update", "actor schedule"]
    sent = [f"actor sends version {version}" for version in range(3)]
    assert record.calls == [sent[0], *step, sent[1], *step, sent[2]]
    assert [line["train/version"] for line in metrics] == [1, 2]


def test_ppo_when_there_are_mini_batches_expected_whole_groups_and_means_and_maxima_over_them(
    ppo_plain: dict[str, Any], record: Record, tmp_path: Path
) -> None:
    # Act
    metrics = run(ppo_plain, tmp_path)

    # Assert
    updates = record.of("actor")
    for step, line in enumerate(metrics):
        pair = updates[2 * step : 2 * step + 2]
        assert sorted(set(update.batch["group_ids"].tolist()) for update in pair) == [{0}, {1}]
        assert all(set(update.batch["trainer_version"].tolist()) == {step} for update in pair)
        assert line["train/loss"] == pytest.approx(sum(update.result["loss"] for update in pair) / 2, abs=1e-9)
        ratios = [update.result["ratio_max"] for update in pair]
        assert line["train/ratio_max"] == max(ratios) > min(ratios)


def test_ppo_update_of_the_critic_expected_its_loss_and_weight_over_all_trained_tokens(
    ppo_plain: dict[str, Any], record: Record, tmp_path: Path
) -> None:
    # Act
    run(ppo_plain, tmp_path)

    # Assert: the loss function that the engine was given, at values of which some leave the clip range.
    update, *_ = record.of("critic")
    batch = update.batch
    mask, old, returns = batch["loss_mask"], batch["values"].double(), batch["returns"].double()
    new = old + 0.2 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = torch.clamp(new, old - 0.1, old + 0.1)
    expected = 0.7 * 0.5 * torch.maximum((new - returns) ** 2, (near - returns) ** 2)[mask].sum()
    loss = update.loss_fn(TokenOutput(torch.zeros(0), values=new), batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    assert batch.num_seqs == 8 and float(update.weight_fn(batch)) == float(mask.sum())


@pytest.mark.parametrize(("loss_agg", "weight"), [("token_mean", "tokens"), ("seq_mean", "sequences")])
def test_update_of_the_actor_when_aggregated_expected_that_denominator(
    rl_plain: dict[str, Any], record: Record, tmp_path: Path, loss_agg: str, weight: str
) -> None:
    # Arrange
    rl_plain |= {"total_train_steps": 1}
    rl_plain["actor"] |= {"loss_agg": loss_agg}

    # Act
    run(rl_plain, tmp_path)

    # Assert
    (update,) = record.updates
    expected = {"tokens": float(update.batch["loss_mask"].sum()), "sequences": 8.0}
    assert float(update.weight_fn(update.batch)) == pytest.approx(expected[weight])


@pytest.mark.parametrize(("entropy_coef", "kept"), [(0.0, 0), (0.01, 8)])
def test_update_when_no_sample_has_an_advantage_expected_the_entropy_bonus_alone_keeps_them(
    rl_plain: dict[str, Any], record: Record, tmp_path: Path, entropy_coef: float, kept: int
) -> None:
    # Arrange
    rl_plain |= {"total_train_steps": 1, "reward": {"name": "trainer_rewards:always_one_reward_fn"}}
    rl_plain["actor"] |= {"entropy_coef": entropy_coef}

    # Act
    (line,) = run(rl_plain, tmp_path)

    # Assert
    (update,) = record.updates
    assert update.batch.num_seqs == kept
    assert line["train/skipped_seqs"] == 8 if kept == 0 else "train/skipped_seqs" not in line


@pytest.mark.parametrize("trainer", ["sft", "distill"])
def test_steps_when_there_is_one_model_expected_an_update_and_a_schedule_step_each(
    trainer: str, sft_plain: dict[str, Any], rl_plain: dict[str, Any], record: Record, tmp_path: Path, tiny_model: Path
) -> None:
    # Arrange
    if trainer == "distill":
        del rl_plain["reward"]
        rl_plain |= {"trainer": "distill", "teacher": {"path": str(tiny_model), "dtype": "float32"}}
    plain = {**(sft_plain if trainer == "sft" else rl_plain), "total_train_steps": 2, "evaluation": {"at_end": False}}

    # Act
    run(plain, tmp_path)

    # Assert
    trained = [call for call in record.calls if "sends" not in call]
    assert trained == ["actor update", "actor schedule"] * 2
    for update in record.updates:
        assert float(update.weight_fn(update.batch)) == float(update.batch["loss_mask"].sum())


@pytest.mark.parametrize("shuffle", [False, True])
def test_sft_when_rows_are_shuffled_or_not_expected_the_order_of_the_runs_seed(
    shuffle: bool, sft_plain: dict[str, Any], record: Record, tmp_path: Path, base_model: Path
) -> None:
    # Arrange
    sft_plain |= {"seed": 5, "total_train_steps": 1, "evaluation": {"at_end": False}}
    sft_plain["train_dataset"]["shuffle"] = shuffle

    # Act
    run(sft_plain, tmp_path)

    # Assert
    rows = get_arithmetic_dataset(None, "train", kind="sft", size=64)
    order = [row["_index"] for row in DataLoader(rows, 8, shuffle=shuffle, seed=5).next_batch()]
    assert (order == list(range(8))) is not shuffle
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    texts = [tokenizer.apply_chat_template(rows[i]["messages"], tokenize=False) for i in order]
    seen = [tokenizer.decode(ids) for ids in record.updates[0].batch.sequences("input_ids")]
    assert seen == [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_divergence_of_the_distill_trainer_expected_the_configured_one_from_student_to_teacher(kind: str) -> None:
    # Arrange: the teacher's logits are its hidden states; of five tokens two are asked for, in another order.
    generator = torch.Generator().manual_seed(0)
    student, hidden = (torch.randn(n, 7, generator=generator, dtype=torch.float64) for n in (2, 5))
    index = torch.tensor([4, 1])
    trainer: Any = SimpleNamespace(
        teacher=SimpleNamespace(logits=lambda states: states), config=SimpleNamespace(divergence=kind, jsd_beta=0.3)
    )
    batch = PackedBatch(torch.tensor([0, 5]).int(), {"input_ids": torch.arange(5), "teacher_hidden": hidden})

    # Act
    result = DistillTrainer._divergence(trainer, batch, student, index)

    # Assert
    p, q = student.softmax(-1), hidden[index].softmax(-1)
    m = 0.3 * q + 0.7 * p
    expected = {
        "reverse_kl": (p * (p / q).log()).sum(-1),
        "forward_kl": (q * (q / p).log()).sum(-1),
        "jsd": 0.3 * (q * (q / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1),
    }[kind]
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
