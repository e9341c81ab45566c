"""`areal train` with `trainer: distill`, end to end on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import areal, read_metrics, record_moves, start_areal, torchrun, untimed, wait_until, write_yaml

from areal_core.algorithms.distill import distill_loss, distill_loss_weight, divergence
from areal_core.api.batch import PackedBatch
from areal_core.api.configs import OptimizerConfig, TrainEngineConfig
from areal_core.api.load import load_run_config
from areal_core.errors import BadInputError, ConfigError
from areal_core.trainer.checks import check_run
from areal_core.trainer.run import train
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine


def random_model(folder: Path, base: Path, *, seed: int, **changes: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # Far from uniform, so that there is something to learn.
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    return random_model(folder, base_model, seed=1, hidden_size=48, intermediate_size=96)


@pytest.fixture
def distill_plain(tiny_model: Path, teacher_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer": "distill",
        "seed": 3,
        "total_train_steps": 3,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": "distill"},
        "actor": {
            "path": str(tiny_model),
            "dtype": "float32",
            "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        },
        "teacher": {"path": str(teacher_model), "dtype": "float32"},
        "rollout": {"backend": "local"},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
        "train_dataset": {"name": "arithmetic", "batch_size": 4, "arithmetic": {"size": 64}},
        "valid_dataset": {"name": "arithmetic", "split": "test", "arithmetic": {"size": 6}},
        "evaluation": {"at_start": True},
        "checkpoint": {"keep_best": 0, "save_final": False},
    }


def engine_of(path: Path, role: str, *, chunk: int = 4096, max_tokens: int | None = None) -> FSDPEngine:
    optimizer = None
    if role == "actor":
        optimizer = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=0.0)
    config = TrainEngineConfig(path=str(path), dtype="float32", optimizer=optimizer)
    config.mb_spec.max_tokens_per_mb = max_tokens
    config.temperature = 0.7
    config.plugin_options["fsdp"] = FSDPConfig(logits_chunk_tokens=chunk)
    engine = FSDPEngine(config)
    engine.create_process_group(config.parsed_backend.parallel)
    engine.initialize(role=role)
    return engine


def ragged_batch() -> PackedBatch:
    """Three sequences; two share a prompt of 4 tokens; the third has nothing to train."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (9 + 7 + 5,), generator=generator)
    ids[9:13] = ids[:4]
    mask = torch.zeros(21, dtype=torch.bool)
    mask[4:9], mask[13:16] = True, True
    return PackedBatch(
        torch.tensor([0, 9, 16, 21]).int(),
        {"input_ids": ids, "loss_mask": mask},
        {"group_ids": torch.tensor([0, 0, 1]), "prompt_lens": torch.tensor([4, 4, 5]).int()},
    )


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize(("chunk", "max_tokens"), [(4096, None), (3, None), (3, 9)])
def test_engine_when_given_a_function_of_logits_equals_plain_transformers(
    kind: Any, chunk: int, max_tokens: int | None, tiny_model: Path, teacher_model: Path
) -> None:
    # Arrange
    from transformers import AutoModelForCausalLM

    batch = ragged_batch()
    actor = engine_of(tiny_model, "actor", chunk=chunk, max_tokens=max_tokens)
    teacher = engine_of(teacher_model, "ref", chunk=chunk, max_tokens=max_tokens)
    before = {name: value.detach().clone() for name, value in actor.model.named_parameters()}

    def logits_fn(micro: PackedBatch, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert len(logits) <= chunk
        return divergence(logits, teacher.logits(micro["teacher_hidden"][index]), kind, 0.3)

    # Act: a step of SGD at rate 1 shows the gradient.
    shard = batch.with_tokens(teacher_hidden=teacher.hidden_states(batch))
    evaluated = actor.eval_batch(shard, distill_loss, distill_loss_weight, logits_fn=logits_fn)
    result = actor.train_batch(shard, distill_loss, distill_loss_weight, logits_fn=logits_fn)

    # Assert: one sequence at a time in fp64.
    student, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (tiny_model, teacher_model)
    )
    losses = []
    bounds = batch.cu_seqlens.tolist()
    for start, end in ((bounds[0], bounds[1]), (bounds[1], bounds[2])):
        ids, mask = batch["input_ids"][None, start:end], batch["loss_mask"][start:end]
        p, q = (torch.softmax(model(input_ids=ids).logits[0, :-1] / 0.7, -1)[mask[1:]] for model in (student, other))
        q = q.detach()
        m = 0.3 * q + 0.7 * p
        losses.append(
            {
                "reverse_kl": (p * (p / q).log()).sum(),
                "forward_kl": (q * (q / p).log()).sum(),
                "jsd": 0.3 * (q * (q / m).log()).sum() + 0.7 * (p * (p / m).log()).sum(),
            }[kind]
        )
    loss = sum(losses) / 8
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert evaluated["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["divergence"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = dict(student.named_parameters())
    for name, value in actor.model.named_parameters():
        torch.testing.assert_close(
            before[name] - value.detach(),
            gradients[name].grad.float(),
            rtol=1e-4,
            atol=2e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    actor.destroy()
    teacher.destroy()


def test_distill_lowers_the_divergence(
    distill_plain: dict[str, Any], sft_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange: a teacher that has learned something.
    sft_plain |= {"total_train_steps": 24, "train_dataset": {"name": "arithmetic", "batch_size": 8}}
    sft_plain["evaluation"] = {"at_end": False}
    taught = train(load_run_config(write_yaml(tmp_path / "sft.yaml", sft_plain), [])).path
    distill_plain["total_train_steps"] = 16
    distill_plain["teacher"]["path"] = str(taught / "weights" / "final")
    distill_plain["actor"]["optimizer"]["lr"] = 1e-2

    # Act
    run = train(load_run_config(write_yaml(tmp_path / "run.yaml", distill_plain), [])).path

    # Assert
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == list(range(17))
    assert metrics[-1]["eval/loss"] < 0.5 * metrics[0]["eval/loss"]
    assert metrics[-1]["eval/divergence"] == metrics[-1]["eval/loss"]


def test_distill_when_the_teacher_is_the_student_is_zero(
    distill_plain: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    distill_plain["teacher"]["path"] = str(tiny_model)
    run = train(load_run_config(write_yaml(tmp_path / "run.yaml", distill_plain), ["total_train_steps=1"])).path
    first, step = read_metrics(run)
    assert abs(first["eval/loss"]) < 1e-6 and abs(step["train/loss"]) < 1e-6


def test_distill_when_models_give_way_expected_the_same_run(
    distill_plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill_plain["total_train_steps"] = 2
    path = write_yaml(tmp_path / "run.yaml", distill_plain)
    straight = train(load_run_config(path, ["run.name=straight"])).path

    moves = record_moves(monkeypatch)
    away = train(load_run_config(path, ["run.name=away", "actor.offload=true", "teacher.offload=true"])).path

    assert untimed(read_metrics(away)) == untimed(read_metrics(straight))
    # The teacher's logits are computed while the actor learns; it sends its weights, and the sampler works.
    turn = ["ref back", "ref logits", "actor back"]
    start = ["actor away", "ref away", "actor back", "actor away"]
    evaluation = [*turn, "actor away", "ref away"]
    step = [*turn, "ref away", "actor away"]
    assert moves[: len(start + evaluation)] == start + evaluation
    assert moves[len(start + evaluation) :][: len(step)] == step


def test_distill_when_vocabularies_differ_says_so(
    distill_plain: dict[str, Any], base_model: Path, tmp_path: Path
) -> None:
    other = random_model(tmp_path / "other", base_model, seed=2, vocab_size=600)
    path = write_yaml(tmp_path / "run.yaml", distill_plain)
    with pytest.raises(BadInputError, match=r"teacher\.path: its vocabulary has 600 entries, the actor's \d+"):
        train(load_run_config(path, [f"teacher.path={other}"]))


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["teacher.optimizer={lr: 1e-3}"], "teacher.optimizer", "a teacher is not trained"),
        (["actor.init_from_scratch=true"], "actor.init_from_scratch", "already write text"),
        (["gconfig.temperature=0"], "gconfig.temperature", "decoding is greedy"),
    ],
)
def test_check_when_distillation_is_misconfigured_names_the_key(
    overrides: list[str], key: str, message: str, distill_plain: dict[str, Any], tmp_path: Path
) -> None:
    config = load_run_config(write_yaml(tmp_path / "run.yaml", distill_plain), overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        check_run(config, 1)
    assert caught.value.key == key


def test_check_when_the_teacher_lies_on_another_mesh_names_the_key(
    distill_plain: dict[str, Any], tmp_path: Path
) -> None:
    path = write_yaml(tmp_path / "run.yaml", distill_plain)
    config = load_run_config(path, ["actor.backend=fsdp:c2", "teacher.backend=fsdp:t2"])
    with pytest.raises(ConfigError, match=r"the actor on \S*c2.*use the actor's mesh") as caught:
        check_run(config, 2)
    assert caught.value.key == "teacher.backend"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
def test_distill_on_two_ranks_equals_one(
    mesh: str, distill_plain: dict[str, Any], base_model: Path, tmp_path: Path
) -> None:
    # Arrange: heads that can be split, and a vocabulary that cannot be split evenly.
    for seed, (key, width) in enumerate({"actor": 32, "teacher": 48}.items()):
        model = random_model(
            tmp_path / key,
            base_model,
            seed=seed,
            hidden_size=width,
            intermediate_size=2 * width,
            num_key_value_heads=2,
            vocab_size=601,
        )
        distill_plain[key]["path"] = str(model)
    distill_plain["total_train_steps"] = 1
    distill_plain["actor"]["fsdp"] = {"logits_chunk_tokens": 5}
    distill_plain["divergence"] = "jsd"
    path = write_yaml(tmp_path / "run.yaml", distill_plain)

    # Act
    one = areal("train", path, "run.name=one")
    two = torchrun(2, "train", path, "run.name=two", f"actor.backend=fsdp:{mesh}", f"teacher.backend=fsdp:{mesh}")

    # Assert
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    first, second = read_metrics(tmp_path / "runs" / "one"), read_metrics(tmp_path / "runs" / "two")
    assert first[0]["eval/loss"] == pytest.approx(second[0]["eval/loss"], rel=1e-4, abs=1e-6)
    for name in ("train/loss", "train/grad_norm"):
        assert first[1][name] == pytest.approx(second[1][name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_distill_when_killed_and_resumed_equals_uninterrupted_run(
    distill_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    distill_plain |= {"total_train_steps": 12, "checkpoint": {"freq_steps": 3, "keep_best": 0, "save_final": False}}
    path = write_yaml(tmp_path / "run.yaml", distill_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"

    # Act
    assert areal("train", path, "run.name=straight").returncode == 0
    process = start_areal("train", path, "run.name=broken")
    wait_until(lambda: len(read_metrics(broken)) >= 6, process)
    process.kill()
    process.wait()
    resumed = areal("train", path, "run.name=broken", "--resume", "auto")

    # Assert
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(read_metrics(broken)) == untimed(read_metrics(straight))
