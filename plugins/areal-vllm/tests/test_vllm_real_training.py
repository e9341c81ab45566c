"""The quickstart's model, trained by GRPO on what a real vLLM server samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
EXAMPLES = Path(__file__).parents[3] / "examples" / "quickstart"
STEPS = 12


def areal(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "areal_core.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model after SFT in it."""
    root = tmp_path_factory.mktemp("runs")
    areal("arithmetic", "init", str(root / "model"))
    areal("train", str(EXAMPLES / "sft.yaml"), f"run.root={root}", "num_threads=1", "evaluation.at_end=false")
    return root


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["distributed"])
def test_grpo_when_vllm_samples(runs: Path, kind: str) -> None:
    areal(
        "train",
        str(EXAMPLES / "grpo.yaml"),
        f"run.root={runs}",
        f"run.name=grpo-{kind}",
        f"total_train_steps={STEPS}",
        f"evaluation.freq_steps={STEPS}",
        "checkpoint.freq_steps=null",
        "num_threads=1",
        "rollout.backend=vllm:d1",
        "rollout.setup_timeout=400",
        "rollout.vllm.args={max-model-len: 128, max-num-seqs: 64}",
        f"actor.weight_update.type={kind}",
    )

    lines = [json.loads(line) for line in (runs / f"grpo-{kind}" / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["eval/reward"] for line in lines if "eval/reward" in line}
    assert rewards[STEPS] > rewards[0] + 0.05
    gaps = [line for line in lines if "train/logprob_gap" in line]
    assert len(gaps) == STEPS
    for line in gaps:
        # The sampler's log-probs against the trainer's own forward, fp32 on both sides.
        assert line["train/logprob_gap"] <= line["train/logprob_gap_max"] < 1e-4
    assert (runs / f"grpo-{kind}" / "logs" / "vllm-0.log").stat().st_size > 0
