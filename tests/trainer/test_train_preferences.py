"""`areal train` with `trainer: rw` and `trainer: dpo`, end to end on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import (
    areal,
    read_metrics,
    record_moves,
    start_areal,
    torchrun,
    untimed,
    wait_until,
    weights,
    write_yaml,
)

from areal_arithmetic.dataset import get_arithmetic_dataset
from areal_core.api.load import load_run_config
from areal_core.errors import ConfigError
from areal_core.trainer.checks import check_run
from areal_core.trainer.run import train
from areal_fsdp.engine import FSDPEngine

SIDES = ("chosen", "rejected")


@pytest.fixture
def pair_plain(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "seed": 3,
        "total_train_steps": 3,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": "pairs"},
        "actor": {
            "path": str(tiny_model),
            "dtype": "float32",
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        },
        "train_dataset": {"name": "arithmetic", "batch_size": 5, "arithmetic": {"size": 40}},
        "valid_dataset": {"name": "arithmetic", "split": "test", "batch_size": 3, "arithmetic": {"size": 7}},
        "evaluation": {"at_start": True},
        "checkpoint": {"keep_best": 0},
    }


@pytest.fixture
def rw_plain(pair_plain: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": "rw", "center_coef": 0.01, **pair_plain}


@pytest.fixture
def dpo_plain(pair_plain: dict[str, Any], tiny_model: Path) -> dict[str, Any]:
    return {"trainer": "dpo", "ref": {"path": str(tiny_model), "dtype": "float32"}, **pair_plain}


def assert_equal_runs(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Up to rounding. While the policy is the reference, DPO's accuracy compares numbers that are equal but for it."""
    for a, b in zip(untimed(first), untimed(second), strict=True):
        tied = {name for name in a if name.endswith("accuracy") and abs(a[name.replace("accuracy", "margin")]) < 1e-5}
        assert {k: v for k, v in a.items() if k not in tied} == pytest.approx(
            {k: v for k, v in b.items() if k not in tied}, rel=1e-4, abs=1e-5
        )


def held_out() -> list[dict[str, Any]]:
    return get_arithmetic_dataset(None, "test", kind="rw", size=7)


def tokens_of(row: dict[str, Any], side: str, tokenizer: Any) -> tuple[torch.Tensor, int]:
    """Prompt, answer and its end-of-turn token ``[1, L]``, and the length of the prompt."""
    prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt), tokenizer.encode(row[side] + tokenizer.eos_token)
    return torch.tensor([ids[0] + ids[1]]), len(ids[0])


def test_rw_evaluation_equals_plain_transformers_on_its_export(rw_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # Act
    run = train(load_run_config(write_yaml(tmp_path / "run.yaml", rw_plain), [])).path

    # Assert: the folder loads as a sequence classifier, whose pooled logit is the score, one sequence at a time.
    final = run / "weights" / "final"
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.config.num_labels == 1
    losses, correct, scores = [], [], {side: [] for side in SIDES}
    for row in held_out():
        with torch.no_grad():
            pair = [model(input_ids=tokens_of(row, side, tokenizer)[0]).logits[0, 0] for side in SIDES]
        losses.append(torch.log1p(torch.exp(pair[1] - pair[0])) + 0.01 * (pair[0] + pair[1]) ** 2)
        correct.append(float(pair[0] > pair[1]))
        for side, score in zip(SIDES, pair, strict=True):
            scores[side].append(float(score))
    last = read_metrics(run)[-1]
    assert last["eval/loss"] == pytest.approx(float(sum(losses)) / 7, abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx(sum(correct) / 7, abs=1e-6)
    for side in SIDES:
        assert last[f"eval/score_{side}"] == pytest.approx(sum(scores[side]) / 7, abs=1e-5)


@pytest.mark.parametrize("role", ["reward", "critic"])
def test_rw_export_when_loaded_as_scalar_head_gives_the_same_scores(
    role: str, rw_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rw_plain["evaluation"] = {"at_start": False, "at_end": True}
    trained = load_run_config(write_yaml(tmp_path / "run.yaml", rw_plain), [])
    run = train(trained).path

    # Act: a second run that starts from the export and only evaluates before its first step.
    rw_plain["actor"]["path"] = str(run / "weights" / "final")
    rw_plain |= {"total_train_steps": 1, "evaluation": {"at_start": True, "at_end": False}}
    rw_plain["run"]["name"] = "again"
    again = train(load_run_config(write_yaml(tmp_path / "again.yaml", rw_plain), [])).path
    engine = FSDPEngine(load_run_config(tmp_path / "again.yaml", []).actor)
    engine.create_process_group(engine.config.parsed_backend.parallel)
    engine.initialize(role=role)

    # Assert
    first, second = read_metrics(run)[-1], read_metrics(again)[0]
    for name in ("eval/loss", "eval/score_chosen", "eval/score_rejected"):
        assert second[name] == pytest.approx(first[name], abs=1e-6)
    assert torch.equal(engine.model.score.weight.detach(), weights(run / "weights" / "final")["score.weight"])
    engine.destroy()


def answer_logprobs(model: Any, tokenizer: Any) -> list[list[float]]:
    """log-prob of each held-out answer, one sequence at a time."""
    result = []
    for row in held_out():
        pair = []
        for side in SIDES:
            ids, start = tokens_of(row, side, tokenizer)
            with torch.no_grad():
                logp = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
            pair.append(float(logp[start - 1 : -1].gather(1, ids[0, start:, None]).sum()))
        result.append(pair)
    return result


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_evaluation_equals_plain_transformers(
    loss: str, smoothing: float, dpo_plain: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    # Arrange
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dpo_plain |= {"loss": loss, "beta": 0.2, "label_smoothing": smoothing}

    # Act
    run = train(load_run_config(write_yaml(tmp_path / "run.yaml", dpo_plain), [])).path

    # Assert
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy, ref = (
        answer_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), tokenizer)
        for path in (run / "weights" / "final", tiny_model)
    )
    h = torch.tensor(policy, dtype=torch.float64) - torch.tensor(ref, dtype=torch.float64)
    difference = h[:, 0] - h[:, 1]
    right, flipped = (torch.log1p(torch.exp(sign * 0.2 * difference)) for sign in (-1, 1))
    losses = (difference - 2.5) ** 2 if loss == "ipo" else (1 - smoothing) * right + smoothing * flipped
    first, last = read_metrics(run)[0], read_metrics(run)[-1]
    assert last["eval/loss"] == pytest.approx(float(losses.mean()), rel=1e-4, abs=1e-5)
    assert last["eval/margin"] == pytest.approx(0.2 * float(difference.mean()), abs=1e-4)
    assert last["eval/reward_chosen"] == pytest.approx(0.2 * float(h[:, 0].mean()), abs=1e-4)
    assert last["eval/accuracy"] == pytest.approx(float((difference > 0).double().mean()), abs=1e-6)
    assert first["eval/margin"] == 0 and last["eval/loss"] < first["eval/loss"]


def test_dpo_when_models_give_way_expected_the_same_run(
    dpo_plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dpo_plain["evaluation"] = {"at_end": False}
    path = write_yaml(tmp_path / "run.yaml", dpo_plain)
    straight = train(load_run_config(path, ["run.name=straight"])).path

    moves = record_moves(monkeypatch)
    away = train(load_run_config(path, ["run.name=away", "actor.offload=true", "ref.offload=true"])).path

    assert untimed(read_metrics(away)) == untimed(read_metrics(straight))
    turn = ["actor away", "ref back", "ref away", "actor back"]
    assert moves == ["actor away", "ref away", "actor back", *turn * 3]


def test_dpo_when_lora_without_ref_uses_the_base_as_reference(
    dpo_plain: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    # Arrange
    dpo_plain["actor"] |= {"lora": {"rank": 4, "alpha": 8.0}}
    dpo_plain["actor"]["optimizer"]["lr"] = 1e-2
    path = write_yaml(tmp_path / "run.yaml", dpo_plain)

    # Act: the same run with a second copy of the base, and without one.
    with_ref = train(load_run_config(path, ["run.name=ref"])).path
    without = train(load_run_config(path, ["run.name=base", "ref=null"])).path

    # Assert
    expected, found = untimed(read_metrics(with_ref)), untimed(read_metrics(without))
    assert abs(expected[-1]["eval/margin"]) > 1e-3
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("trainer", ["rw", "dpo"])
def test_pairs_when_micro_batches_are_small_give_the_same_run(
    trainer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Arrange: a budget of one token, so that every pair stands alone.
    path = write_yaml(tmp_path / "run.yaml", request.getfixturevalue(f"{trainer}_plain"))

    # Act
    whole = train(load_run_config(path, ["run.name=whole"])).path
    split = train(load_run_config(path, ["run.name=split", "actor.mb_spec.max_tokens_per_mb=1"])).path

    # Assert
    assert_equal_runs(read_metrics(whole), read_metrics(split))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["rw", "dpo"])
def test_pairs_on_two_ranks_equal_one(trainer: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # Arrange: one pair a step leaves the second rank without a sequence.
    plain = request.getfixturevalue(f"{trainer}_plain")
    path = write_yaml(tmp_path / "run.yaml", plain)
    sizes = (5, 1)

    # Act
    runs: dict[str, list[list[dict[str, Any]]]] = {"one": [], "two": []}
    for size in sizes:
        override = [f"train_dataset.batch_size={size}"]
        one = areal("train", path, f"run.name=one-{size}", *override)
        more = ["actor.backend=fsdp:d2", *(["ref.backend=fsdp:d2"] if trainer == "dpo" else [])]
        two = torchrun(2, "train", path, f"run.name=two-{size}", *override, *more)
        assert one.returncode == 0, one.stderr
        assert two.returncode == 0, two.stderr
        for name, found in runs.items():
            found.append(read_metrics(tmp_path / "runs" / f"{name}-{size}"))

    # Assert
    for first, second in zip(runs["one"], runs["two"], strict=True):
        assert_equal_runs(first, second)


@pytest.mark.slow
def test_dpo_when_killed_and_resumed_equals_uninterrupted_run_bitwise(
    dpo_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    dpo_plain |= {"total_train_steps": 20, "total_train_epochs": 3, "checkpoint": {"freq_steps": 4, "keep_best": 0}}
    path = write_yaml(tmp_path / "run.yaml", dpo_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"

    # Act
    assert areal("train", path, "run.name=straight").returncode == 0
    process = start_areal("train", path, "run.name=broken")
    wait_until(lambda: len(read_metrics(broken)) >= 7, process)
    process.kill()
    process.wait()
    resumed = areal("train", path, "run.name=broken", "--resume", "auto")

    # Assert
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(read_metrics(broken)) == untimed(read_metrics(straight))


@pytest.mark.parametrize(
    ("trainer", "overrides", "key", "message"),
    [
        ("dpo", ["ref=null"], "ref", "is missing.*or train adapters"),
        ("dpo", ["ref.optimizer={lr: 1e-3}"], "ref.optimizer", "a reference is not trained"),
        ("dpo", ["actor.init_from_scratch=true"], "actor.init_from_scratch", "goes on from a trained model"),
        ("dpo", ["loss=ipo", "label_smoothing=0.1"], "label_smoothing", "belongs to `loss: sigmoid`"),
        ("rw", ["actor.lora={rank: 4}"], "actor.lora.modules_to_save", "must name `score`"),
        ("rw", ["actor.optimizer=null"], "actor.optimizer", "is missing"),
    ],
)
def test_check_when_pairs_are_misconfigured_names_the_key(
    trainer: str, overrides: list[str], key: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = load_run_config(write_yaml(tmp_path / "run.yaml", request.getfixturevalue(f"{trainer}_plain")), overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        check_run(config, 1)
    assert caught.value.key == key


def test_rl_when_lora_without_ref_uses_the_base_as_reference(
    rl_plain: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    # Arrange
    rl_plain["actor"] |= {"lora": {"rank": 4, "alpha": 8.0}, "kl_ctl": 0.5}
    rl_plain["actor"]["optimizer"]["lr"] = 1e-2
    rl_plain["ref"] = {"path": str(tiny_model), "dtype": "float32"}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    with_ref = train(load_run_config(path, ["run.name=ref"])).path
    without = train(load_run_config(path, ["run.name=base", "ref=null"])).path

    # Assert
    expected, found = untimed(read_metrics(with_ref)), untimed(read_metrics(without))
    assert any("kl" in name and value > 1e-6 for name, value in expected[-1].items())
    for a, b in zip(expected, found, strict=True):
        assert {n: v for n, v in a.items() if "train/" in n} == pytest.approx(
            {n: v for n, v in b.items() if "train/" in n}, rel=1e-3, abs=1e-5
        )
