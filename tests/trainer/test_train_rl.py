"""`areal train` with `trainer: rl`, end to end on a tiny random model."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import HERE, areal, read_metrics, start_areal, torchrun, untimed, wait_until, weights, write_yaml
from transformers import AutoConfig, AutoModelForCausalLM

from areal_core.api.load import load_run_config
from areal_core.runs.run_dir import iter_trajectories
from areal_core.trainer.run import train


@pytest.fixture(autouse=True)
def _rewards_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def test_train_when_rl_writes_run_directory_and_moves_weights(
    rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    # Arrange
    rl_plain["checkpoint"] = {"save_final": True, "keep_best": 1, "metric": "eval/reward"}
    rl_plain["evaluation"] = {"at_start": True, "freq_steps": 2, "at_end": False}
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])

    # Act
    result = train(config)

    # Assert
    run = result.path
    assert result.status == "finished"
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert all(math.isfinite(line["train/loss"]) for line in metrics[1:])
    assert "eval/reward" in metrics[0] and "eval/reward" in metrics[2] and "eval/reward" not in metrics[1]
    assert metrics[1]["rollout/accepted"] == 8
    before, after = weights(tiny_model), weights(run / "weights" / "final")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    state = json.loads((run / "state.json").read_text())
    assert state["status"] == "finished" and state["step"] == 3
    assert (run / "checkpoints" / "step-000003" / "trainer.json").exists()
    assert len(list((run / "weights").glob("step-*"))) == 1
    assert (run / "report.html").exists()


def test_train_when_on_policy_sampler_and_trainer_agree(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: in sync mode the ratio of the first update is exp(trainer's - sampler's log-prob).
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])

    # Act
    run = train(config).path

    # Assert
    for line in read_metrics(run):
        assert line["train/logprob_gap"] < 1e-5


def test_exported_weights_when_loaded_by_transformers_generate_the_same(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rl_plain["checkpoint"] = {"save_final": True, "keep_best": 0}
    rl_plain["evaluation"] = {"at_end": True}
    rl_plain["eval_gconfig"] = {"greedy": True, "max_new_tokens": 8}
    config = load_run_config(write_yaml(tmp_path / "run.yaml", rl_plain), [])

    # Act
    run = train(config).path

    # Assert
    model = AutoModelForCausalLM.from_pretrained(run / "weights" / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "weights" / "final")
    lines = list(iter_trajectories(run, split="eval"))
    assert len(lines) == 6
    for line in lines:
        ids, expected = line["input_ids"][: line["prompt_len"]], line["input_ids"][line["prompt_len"] :]
        output = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
        stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        cut = next((i + 1 for i, token in enumerate(output) if token in stops), len(output))
        assert expected == output[:cut]


@pytest.mark.slow
def test_resume_after_kill_equals_uninterrupted_run_bitwise(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 6
    rl_plain["checkpoint"] = {"freq_steps": 3, "keep_best": 0, "save_final": True, "keep_last": 2}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"

    # Act
    assert areal("train", path, "run.name=straight").returncode == 0
    process = start_areal("train", path, "run.name=broken")
    wait_until(lambda: len(read_metrics(broken)) >= 4, process)
    process.kill()
    process.wait()
    resumed = areal("train", path, "run.name=broken", "--resume", "must")

    # Assert
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(read_metrics(broken)) == untimed(read_metrics(straight))
    expected, found = weights(straight / "weights" / "final"), weights(broken / "weights" / "final")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_train_when_interrupted_saves_and_resumes_to_the_same_weights(
    rl_plain: dict[str, Any], tmp_path: Path, signum: signal.Signals
) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 6
    rl_plain["checkpoint"] = {"keep_best": 0, "save_final": True}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"

    # Act
    assert areal("train", path, "run.name=straight").returncode == 0
    process = start_areal("train", path, "run.name=broken")
    wait_until(lambda: len(read_metrics(broken)) >= 2, process)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=120)
    state = json.loads((broken / "state.json").read_text())
    resumed = areal("train", path, "run.name=broken", "--resume", "auto")

    # Assert
    assert process.returncode == 128 + signum, output
    assert "Traceback" not in output
    assert state["status"] == "interrupted" and state["step"] >= 2
    assert resumed.returncode == 0, resumed.stderr
    expected, found = weights(straight / "weights" / "final"), weights(broken / "weights" / "final")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d2", "c2"])
def test_train_on_two_ranks_equals_one(mesh: str, rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: one group of three a step, so that two ranks hold uneven shards of one group.
    rl_plain["gconfig"]["n_samples"] = 3
    rl_plain["train_dataset"]["batch_size"] = 1
    rl_plain["checkpoint"] = {"keep_best": 0, "save_final": True}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    one = areal("train", path, "run.name=one")
    two = torchrun(2, "train", path, "run.name=two", f"actor.backend=fsdp:{mesh}")

    # Assert
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    first, second = read_metrics(tmp_path / "runs" / "one"), read_metrics(tmp_path / "runs" / "two")
    for a, b in zip(first, second, strict=True):
        assert a["rollout/reward"] == pytest.approx(b["rollout/reward"], abs=1e-6)
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes", [{"actor": "t2", "critic": "t2", "ref": "t2"}, {"actor": "d2", "critic": "t2", "ref": "c2"}], ids=str
)
def test_train_when_ppo_on_any_meshes_equals_one(
    meshes: dict[str, str], rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    # Arrange: everything that a step can have; the critic and the reference may be split otherwise than the actor.
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    splits = AutoConfig.from_pretrained(folder, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(splits).save_pretrained(folder)
    rl_plain["total_train_steps"] = 2
    rl_plain["algorithm"] = {"name": "ppo"}
    rl_plain["gconfig"]["temperature"] = 0.7
    rl_plain["actor"] |= {
        "ppo_n_minibatches": 2,
        "entropy_coef": 0.01,
        "kl_ctl": 0.05,
        "gradient_checkpointing": "full",
    }
    rl_plain["actor"] |= {"mb_spec": {"max_tokens_per_mb": 60}}
    rl_plain["actor"]["optimizer"] |= {"lr": 1e-4, "eps": 1e-4}
    rl_plain["actor"]["path"] = str(folder)
    rl_plain["ref"] = {"path": str(folder), "dtype": "float32"}
    rl_plain["critic"] = {"path": str(folder), "dtype": "float32", "optimizer": {"lr": 1e-4, "eps": 1e-4}}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    one = areal("train", path, "run.name=one")
    two = torchrun(2, "train", path, "run.name=two", *(f"{role}.backend=fsdp:{m}" for role, m in meshes.items()))

    # Assert
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert "Warning" not in two.stderr
    first, second = untimed(read_metrics(tmp_path / "runs" / "one")), untimed(read_metrics(tmp_path / "runs" / "two"))
    for a, b in zip(first, second, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_train_when_asynchronous_respects_the_staleness_bound(rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 8
    rl_plain["rollout"]["max_head_offpolicyness"] = 2
    rl_plain["actor"]["use_decoupled_loss"] = True
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    done = areal("train", path)

    # Assert
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path / "runs" / "rl")
    assert len(metrics) == 8
    assert all(0 <= line["rollout/version_lag_max"] <= 2 for line in metrics)
    assert max(line["rollout/version_lag_max"] for line in metrics) > 0


def test_eval_when_given_weights_prints_json(rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    # Arrange
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    done = areal("eval", path, "--weights", tiny_model, "--json")

    # Assert
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert 0 <= metrics["eval/reward"] <= 1


def test_train_when_asynchronous_on_rows_that_no_json_holds_saves_and_resumes(
    rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain["rollout"]["max_head_offpolicyness"] = 2
    rl_plain["train_dataset"] = {"name": "trainer_rewards:bytes_dataset", "batch_size": 2}
    rl_plain["reward"] = {"name": "trainer_rewards:picture_reward_fn"}
    del rl_plain["valid_dataset"]
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    train(load_run_config(path, ["total_train_steps=2"]))
    run = train(load_run_config(path, ["total_train_steps=4"]), resume="must").path

    # Assert
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]
    episodes = list(iter_trajectories(run))
    trained = [(e["step"], e["uid"]) for e in episodes if e["outcome"] == "accepted"]
    groups = set(trained)
    assert len(trained) == 4 * len(groups) and len({uid for _, uid in groups}) == len(groups) == 8
    # What was under way when the first run ended was played again: its record is gone.
    assert {e["step"] for e in episodes if e["outcome"] == "cancelled"} <= {5}
    assert len({(e["uid"], e["sample"]) for e in episodes}) == len(episodes)
