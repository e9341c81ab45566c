"""Everything a user can get wrong: one clear error, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import HERE, write_yaml

from areal_core.cli.main import main


@pytest.fixture(autouse=True)
def _rewards_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


class Outcome:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr


@pytest.fixture
def areal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process: it saves ten seconds of imports a case."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["areal", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return Outcome(int(code or 0), captured.out, captured.err)

    return run


def change(plain: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    *path, last = dotted.split(".")
    target = plain
    for key in path:
        target = target.setdefault(key, {})
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return plain


CASES = [
    pytest.param("actor.backend", "fsdpp:d1", ["actor.backend", "fsdpp", "fsdp"], id="unknown-train-engine"),
    pytest.param("rollout.backend", "vlm", ["rollout.backend", "vlm"], id="unknown-inference-engine"),
    pytest.param("rollout.backend", "local:d2", ["rollout.backend", "d2", "one model"], id="local-has-no-mesh"),
    pytest.param("reward.name", "gsm9k", ["reward.name", "gsm9k", "gsm8k"], id="unknown-reward"),
    pytest.param("rewards", {"a": {"name": "gsm8k"}}, ["rewards", "`reward`", "Give one"], id="both-rewards"),
    pytest.param("reward", ..., ["reward: is required", "rewards"], id="no-reward"),
    pytest.param("workflow.name", "rlvrr", ["workflow.name", "rlvr"], id="unknown-workflow"),
    pytest.param("algorithm.name", "grp", ["algorithm.name", "grpo"], id="unknown-algorithm"),
    pytest.param("train_dataset.name", "arithmetics", ["train_dataset.name", "arithmetic"], id="unknown-dataset"),
    pytest.param("trackers", [{"name": "tensorbord"}], ["trackers", "tensorboard"], id="unknown-tracker"),
    pytest.param("trainer", "rll", ["trainer", "rl"], id="unknown-trainer"),
    pytest.param("actor.learning_rate", 1e-5, ["actor.learning_rate"], id="unknown-key"),
    pytest.param("actor.optimizer.lr", "fast", ["actor.optimizer.lr", "fast"], id="wrong-type"),
    pytest.param("actor.optimizer.lr", float("inf"), ["actor.optimizer.lr", "finite", "inf"], id="infinite"),
    pytest.param("actor.optimizer.lr", -1.0, ["actor.optimizer.lr", ">= 0", "-1"], id="out-of-bounds"),
    pytest.param("actor.optimizer", ..., ["actor.optimizer", "missing"], id="no-optimizer"),
    pytest.param("actor.path", "/nowhere/model", ["actor.path", "/nowhere/model"], id="no-model"),
    pytest.param("actor.backend", "fsdp:d2", ["actor.backend", "torchrun"], id="world-size"),
    pytest.param("actor.backend", "fsdp:d1x", ["actor.backend", "'x'"], id="backend-string"),
    pytest.param("gconfig.n_samples", 1, ["n_samples", "group"], id="group-of-one-with-group-std"),
    pytest.param("gconfig.temperature", 0, ["gconfig.temperature", "greedy"], id="greedy-training"),
    pytest.param("gconfig.seed", 5, ["gconfig.seed", "the same"], id="one-seed-for-all-samples"),
    pytest.param("eval_gconfig", {"seed": 5, "n_samples": 2}, ["eval_gconfig.seed"], id="one-seed-in-evaluation"),
    pytest.param("gconfig.top_p", 0.9, ["gconfig.top_p", "gconfig.top_k", "1024", "1.0"], id="top-p-without-bound"),
    pytest.param("gconfig.min_p", 0.1, ["gconfig.min_p", "gconfig.top_k", "1024", "0.0"], id="min-p-without-bound"),
    pytest.param("gconfig.top_k", 1025, ["gconfig.top_k", "1025", "1024"], id="top-k-too-large"),
    pytest.param("actor.kl_ctl", 0.1, ["ref"], id="kl-without-reference"),
    pytest.param("actor.gae_lambda", 0.9, ["critic"], id="lambda-without-critic"),
    pytest.param("actor.ppo_n_minibatches", 3, ["ppo_n_minibatches", "8"], id="batch-not-divisible"),
    pytest.param(
        "train_dataset.batch_size", 17, ["train_dataset.batch_size", "17", "16"], id="batch-larger-than-dataset"
    ),
    pytest.param("train_dataset.max_length", 1, ["max_length"], id="empty-dataset"),
    pytest.param("valid_dataset", ..., ["valid_dataset"], id="no-held-out-split"),
    pytest.param("train_dataset.split", "dev", ["train", "test", "dev"], id="unknown-split"),
    pytest.param("reward.name", "trainer_rewards:no_such", ["reward.name", "no_such"], id="import-path"),
]


@pytest.mark.parametrize(("key", "value", "words"), CASES)
def test_train_when_configuration_is_bad_says_what_and_exits_2(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path, key: str, value: Any, words: list[str]
) -> None:
    # Arrange
    rl_plain["evaluation"] = {"freq_steps": 1}
    path = write_yaml(tmp_path / "run.yaml", change(rl_plain, key, value))

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2, outcome.stderr
    assert "Traceback" not in outcome.stderr
    for word in words:
        assert word in outcome.stderr


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("areal_local.engine.LocalEngine.returns_supports", ["'local'", "raw log-probs", "1.0"]),
        ("areal_fsdp.engine.FSDPEngine.takes_supports", ["'fsdp'", "log-probs over the tokens", "1.0"]),
    ],
)
@pytest.mark.parametrize("command", [("train",), ("config", "check")])
def test_truncation_when_an_engine_knows_only_raw_logprobs_names_the_key_and_the_engine(
    areal: Any,
    rl_plain: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    words: list[str],
    command: tuple[str, ...],
) -> None:
    # Arrange
    monkeypatch.setattr(engine, False)
    rl_plain["gconfig"] |= {"top_p": 0.9, "top_k": 20}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal(*command, path)

    # Assert
    assert outcome.code == 2 and "Traceback" not in outcome.stderr
    for word in ("gconfig.top_p", *words):
        assert word in outcome.stderr


def test_train_when_file_is_missing_names_it(areal: Any, tmp_path: Path) -> None:
    outcome = areal("train", tmp_path / "nope.yaml")

    assert outcome.code == 2 and "nope.yaml" in outcome.stderr


def test_train_when_yaml_is_broken_names_the_line(areal: Any, tmp_path: Path) -> None:
    # Arrange
    path = tmp_path / "run.yaml"
    path.write_text("trainer: rl\nactor: [unclosed\n")

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and "run.yaml:" in outcome.stderr


def test_train_when_prompt_exceeds_the_context_says_both_lengths(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain["train_dataset"] = {"name": "trainer_rewards:long_dataset", "batch_size": 2}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and "context" in outcome.stderr and "256" in outcome.stderr


def test_train_when_dataset_has_no_messages_lists_its_columns(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain["train_dataset"] = {"name": "trainer_rewards:wrong_columns_dataset", "batch_size": 2}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and "messages" in outcome.stderr and "question" in outcome.stderr


def test_train_when_tokenizer_has_no_chat_template_says_so(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    # Arrange
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rl_plain["tokenizer_path"] = str(tmp_path / "tokenizer")
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and "chat template" in outcome.stderr


def test_train_when_run_root_is_a_file_names_it(areal: Any, rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    (tmp_path / "runs").write_text("not a folder")
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and str(tmp_path / "runs") in outcome.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_train_when_run_root_is_read_only_names_it(areal: Any, rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    (tmp_path / "runs").mkdir(mode=0o500)
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and str(tmp_path / "runs") in outcome.stderr


def test_resume_when_configuration_changed_lists_the_keys(areal: Any, rl_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 1
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    assert areal("train", path).code == 0

    # Act
    outcome = areal("train", path, "actor.eps_clip=0.3", "--resume", "auto")

    # Assert
    assert outcome.code == 2
    assert "actor.eps_clip" in outcome.stderr and "0.2" in outcome.stderr and "0.3" in outcome.stderr


@pytest.mark.parametrize("key", ["version", "rollouts"])
def test_resume_when_trainer_json_lacks_a_key_names_the_file(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path, key: str
) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 1
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    assert areal("train", path).code == 0
    file = tmp_path / "runs" / "rl" / "checkpoints" / "step-000001" / "trainer.json"
    state = json.loads(file.read_text())
    del state[key]
    file.write_text(json.dumps(state))

    # Act
    outcome = areal("train", path, "total_train_steps=2", "--resume", "auto")

    # Assert
    assert outcome.code == 2, outcome.stderr
    assert f"{file.parent}: this checkpoint cannot be read (trainer.json holds no {key!r})" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_train_when_run_exists_and_resume_is_never_refuses(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain["total_train_steps"] = 1
    path = write_yaml(tmp_path / "run.yaml", rl_plain)
    assert areal("train", path).code == 0
    before = (tmp_path / "runs" / "rl" / "metrics.jsonl").read_bytes()

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2 and "--resume" in outcome.stderr
    assert (tmp_path / "runs" / "rl" / "metrics.jsonl").read_bytes() == before


def test_resume_must_when_there_is_nothing_refuses(areal: Any, rl_plain: dict[str, Any], tmp_path: Path) -> None:
    outcome = areal("train", write_yaml(tmp_path / "run.yaml", rl_plain), "--resume", "must")

    assert outcome.code == 2 and "resume" in outcome.stderr


def test_train_when_every_reward_fails_stops_with_the_reason(
    areal: Any, rl_plain: dict[str, Any], tmp_path: Path
) -> None:
    # Arrange
    rl_plain["reward"] = {"name": "trainer_rewards:always_raises_reward_fn"}
    path = write_yaml(tmp_path / "run.yaml", rl_plain)

    # Act
    outcome = areal("train", path)

    # Assert
    assert outcome.code == 2, outcome.stderr
    assert "always broken" in outcome.stderr
    assert "Traceback" not in outcome.stderr
