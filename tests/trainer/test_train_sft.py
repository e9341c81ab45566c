"""`areal train` with `trainer: sft`, end to end on a tiny model from nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import areal, read_metrics, start_areal, torchrun, untimed, wait_until, weights, write_yaml

from areal_arithmetic.model import write_model_folder
from areal_core.api.load import load_run_config
from areal_core.errors import ArealError
from areal_core.trainer.run import train
from areal_fsdp.engine import FSDPEngine


def test_train_when_sft_lowers_the_held_out_loss(sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    sft_plain["total_train_steps"] = 12
    config = load_run_config(write_yaml(tmp_path / "run.yaml", sft_plain), [])

    # Act
    run = train(config).path

    # Assert
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == list(range(13))
    assert metrics[-1]["eval/loss"] < 0.8 * metrics[0]["eval/loss"]


def test_eval_loss_equals_plain_transformers(sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from areal_arithmetic.dataset import get_arithmetic_dataset

    sft_plain["evaluation"] = {"limit": 5}
    config = load_run_config(write_yaml(tmp_path / "run.yaml", sft_plain), [])

    # Act
    run = train(config).path

    # Assert: mean over all assistant tokens of the first five held-out rows, one sequence at a time.
    model = AutoModelForCausalLM.from_pretrained(run / "weights" / "final", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(run / "weights" / "final")
    total, count = 0.0, 0
    for row in get_arithmetic_dataset(None, "test", kind="sft", size=7)[:5]:
        out = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        ids = torch.tensor([out["input_ids"]])
        mask = torch.tensor(out["assistant_masks"]).bool()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        picked = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0][mask[1:]]
        total, count = total - float(picked.sum()), count + int(mask[1:].sum())
    assert read_metrics(run)[-1]["eval/loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_resume_when_killed_equals_uninterrupted_run_bitwise(sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange
    sft_plain["total_train_steps"] = 40
    sft_plain["checkpoint"] = {"freq_steps": 5, "keep_best": 0}
    path = write_yaml(tmp_path / "run.yaml", sft_plain)
    straight, broken = tmp_path / "runs" / "straight", tmp_path / "runs" / "broken"

    # Act
    assert areal("train", path, "run.name=straight").returncode == 0
    process = start_areal("train", path, "run.name=broken")
    wait_until(lambda: len(read_metrics(broken)) >= 8, process)
    process.kill()
    process.wait()
    resumed = areal("train", path, "run.name=broken", "--resume", "auto")

    # Assert
    assert resumed.returncode == 0, resumed.stderr
    assert untimed(read_metrics(broken)) == untimed(read_metrics(straight))
    expected, found = weights(straight / "weights" / "final"), weights(broken / "weights" / "final")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d2", "t2", "c2"])
def test_sft_on_two_ranks_equals_one(mesh: str, sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: a batch of one leaves the second rank of d2 without a sequence.
    sft_plain["train_dataset"]["batch_size"] = 1
    write_model_folder(tmp_path / "base", hidden=32, layers=2, heads=4, overwrite=False)  # 2 KV heads
    sft_plain["actor"]["path"] = str(tmp_path / "base")
    path = write_yaml(tmp_path / "run.yaml", sft_plain)

    # Act
    one = areal("train", path, "run.name=one")
    two = torchrun(2, "train", path, "run.name=two", f"actor.backend=fsdp:{mesh}")

    # Assert
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stderr.count("Finished: ") == 1
    first, second = read_metrics(tmp_path / "runs" / "one"), read_metrics(tmp_path / "runs" / "two")
    for a, b in zip(first[1:], second[1:], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5, abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)


def test_train_when_interrupted_within_an_evaluation_reports_no_part_of_it(
    sft_plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrange: three batches of held-out rows, the signal within the first.
    sft_plain["evaluation"] = {"freq_steps": 1}
    plain_eval_batch = FSDPEngine.eval_batch

    def eval_batch(self: FSDPEngine, *arguments: Any, **keywords: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        return plain_eval_batch(self, *arguments, **keywords)

    monkeypatch.setattr(FSDPEngine, "eval_batch", eval_batch)

    # Act
    done = train(load_run_config(write_yaml(tmp_path / "run.yaml", sft_plain), []))

    # Assert
    assert done.status == "interrupted"
    (line,) = read_metrics(done.path)
    assert line["step"] == 1 and "eval/loss" not in line


def test_train_when_every_gradient_is_not_finite_stops_with_the_key(sft_plain: dict[str, Any], tmp_path: Path) -> None:
    # Arrange: the first step blows the weights up, so that every later loss is infinite or NaN.
    sft_plain["total_train_steps"] = 12
    sft_plain["actor"]["optimizer"] = {
        "type": "sgd",
        "lr": 1e30,
        "gradient_clipping": 0.0,
        "weight_decay": 0.0,
        "max_skipped": 3,
    }
    sft_plain["evaluation"] = {"at_end": False}
    path = write_yaml(tmp_path / "run.yaml", sft_plain)

    # Act
    with pytest.raises(ArealError, match=r"optimizer\.max_skipped.*3 steps in a row"):
        train(load_run_config(path, []))

    # Assert: the steps before it were logged as skipped.
    skipped = [line["train/update_skipped"] for line in read_metrics(tmp_path / "runs" / "sft")]
    assert skipped == [0.0, 1.0, 1.0]
