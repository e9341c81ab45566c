"""A sampler that truncates and a trainer that knows what it kept: real rollouts scored, and the ratio's expectation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from trainer_harness import areal, read_metrics, torchrun, write_yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from areal_core.api.batch import PackedBatch
from areal_core.api.configs import InferenceEngineConfig, TrainEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.data.packing import pack_trajectories
from areal_core.rollout.context import EpisodeEngine
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.support import support_logprobs
from areal_local.config import LocalConfig
from areal_local.engine import LocalEngine
from areal_local.sampling import SamplingParams, sample_from_candidates

#: Between them: every row is cut by top-k, or top-p, or min-p.
GCONFIG = GenerationHyperparameters(max_new_tokens=12, temperature=1.3, top_p=0.9, top_k=8, min_p=0.03, ignore_eos=True)


@pytest.fixture(scope="module")
def sharp_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that distributions differ from token to token, and top-p and min-p cut them."""
    folder = tmp_path_factory.mktemp("model") / "sharp"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model, initializer_range=0.3))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(folder)
    return folder


@pytest.fixture
def score(sharp_model: Path) -> Callable[[PackedBatch], torch.Tensor]:
    """Log-probs by the train engine, of the same weights, a few tokens' logits at a time."""
    config = TrainEngineConfig(path=str(sharp_model), dtype="float32", temperature=GCONFIG.temperature)
    config.plugin_options = {"fsdp": FSDPConfig(logits_chunk_tokens=16)}
    engine = FSDPEngine(config)
    engine.create_process_group(config.parsed_backend.parallel)
    engine.initialize()
    return lambda batch: engine.forward(batch).logprobs


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def sampler(request: pytest.FixtureRequest, sharp_model: Path) -> Iterator[LocalEngine]:
    options = LocalConfig(process=request.param == "process", num_threads=1)
    engine = LocalEngine(InferenceEngineConfig(plugin_options={"local": options}, dtype="float32"))
    engine.initialize(str(sharp_model))
    yield engine
    engine.destroy()


def play(engine: LocalEngine, episode: Callable[[EpisodeEngine], Any], count: int = 6) -> list[Trajectory]:
    """``count`` episodes at once, as the controller plays them in training."""

    async def main() -> list[Trajectory]:
        engines = [EpisodeEngine(engine, uid="u", sample=i, seed=7, with_supports=True) for i in range(count)]
        return list(await asyncio.gather(*map(episode, engines)))

    return asyncio.run(main())


async def ask(engine: EpisodeEngine, ids: list[int], **changes: Any) -> ModelResponse:
    return await engine.agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG.new(**changes)))


def test_ratio_when_on_policy_is_one(sampler: LocalEngine, score: Callable[[PackedBatch], torch.Tensor]) -> None:
    # Arrange
    async def episode(engine: EpisodeEngine) -> Trajectory:
        return Trajectory.from_response(await ask(engine, [5, 6, 3 + engine.sample]), 1.0)

    # Act
    batch = pack_trajectories(play(sampler, episode))

    # Assert
    mask, supports = batch["loss_mask"], batch["supports"]
    sizes = (supports >= 0).sum(1)
    assert sizes[~mask].max() == 0 and sizes[mask].min() >= 1 and len(sizes[mask].unique()) > 3
    assert_close(score(batch), batch["logprobs"], rtol=0, atol=1e-5)
    # Not by chance: over the whole vocabulary the two differ.
    assert (score(batch.without("supports")) - batch["logprobs"])[mask].abs().mean() > 0.05


def test_ratio_when_turns_are_sampled_in_other_ways_is_one_in_each(
    sampler: LocalEngine, score: Callable[[PackedBatch], torch.Tensor]
) -> None:
    # Arrange: a truncated turn, one from the whole vocabulary, one that keeps more tokens; a user speaks in between.
    async def episode(engine: EpisodeEngine) -> Trajectory:
        turns = [await ask(engine, [5, 6, 3 + engine.sample])]
        for changes in ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, {"top_k": 11, "top_p": 1.0, "min_p": 0.0}):
            turns.append(await ask(engine, [*turns[-1].input_tokens, *turns[-1].output_tokens, 9, 4], **changes))
        return Trajectory.from_turns(turns, 1.0)

    # Act
    trajectories = play(sampler, episode)
    batch = pack_trajectories(trajectories)

    # Assert
    first = trajectories[0]
    assert first.n_turns == 3 and first.supports is not None and first.supports.shape == (3 + 12 + 2 + 12 + 2 + 12, 11)
    kept = (first.supports >= 0).sum(1)
    assert kept[:3].max() == 0 and kept[3:15].min() > 0 and kept[15:31].max() == 0 and set(kept[31:]) == {11}
    assert_close(score(batch), batch["logprobs"], rtol=0, atol=1e-5)


def truncated(plain: dict[str, Any], model: Path) -> dict[str, Any]:
    """GRPO with everything that reads log-probs: KL to a reference, entropy, a correction, two updates a step."""
    plain["actor"] |= {"path": str(model), "kl_ctl": 0.05, "entropy_coef": 0.01, "importance": {"mode": "clamp"}}
    plain["ref"] = {"path": str(model), "dtype": "float32"}
    plain["gconfig"] |= {"temperature": 1.2, "top_p": 0.8, "top_k": 6, "min_p": 0.02}
    return plain


def check_metrics(run: Path) -> None:
    steps = [line for line in read_metrics(run) if "train/ratio" in line]
    assert len(steps) == 3
    for step in steps:
        assert step["train/logprob_gap_max"] < 1e-5
        assert step["train/behave_ratio_max"] == pytest.approx(1, abs=1e-5)
        assert step["train/ratio"] == pytest.approx(1, abs=1e-5)
        # Of six tokens at most: log 6.
        assert 0 < step["train/entropy"] < 1.792
    # The reference is the actor at first, over the same tokens.
    assert steps[0]["train/ref_kl"] == pytest.approx(0, abs=1e-6) and steps[2]["train/ref_kl"] > 1e-5


def test_train_when_sampling_is_truncated_has_a_ratio_of_one_on_policy(
    rl_plain: dict[str, Any], sharp_model: Path, tmp_path: Path
) -> None:
    # Act
    done = areal("train", write_yaml(tmp_path / "run.yaml", truncated(rl_plain, sharp_model)))

    # Assert
    run = tmp_path / "runs" / "rl"
    assert done.returncode == 0, done.stderr
    check_metrics(run)
    lines = [json.loads(line) for path in run.glob("trajectories/train-*.jsonl") for line in path.open()]
    assert lines and not any("supports" in line for line in lines)


@pytest.mark.slow
def test_train_when_truncated_on_two_ranks_has_a_ratio_of_one(
    rl_plain: dict[str, Any], sharp_model: Path, tmp_path: Path
) -> None:
    # Arrange
    plain = truncated(rl_plain, sharp_model)
    plain["actor"]["backend"], plain["ref"]["backend"] = "fsdp:c2", "fsdp:d2"

    # Act
    done = torchrun(2, "train", write_yaml(tmp_path / "run.yaml", plain))

    # Assert
    assert done.returncode == 0, done.stderr
    check_metrics(tmp_path / "runs" / "rl")


def drawn(behaviour: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``count`` tokens from truncated ``softmax(behaviour)``, their log-probs, and the one support of them all."""
    noise = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(
        uniforms=noise,
        top_k=torch.full((count,), 12),
        top_p=torch.full((count,), 0.8),
        supports=torch.arange(count),
    )
    tokens, logprobs, complete, kept = sample_from_candidates(behaviour.expand(count, -1), params)
    assert kept is not None and (complete is None or bool(complete)) and (kept == kept[0]).all()
    return tokens, logprobs.double(), kept[:1]


def test_ratio_when_off_policy_gives_unbiased_values_and_gradients() -> None:
    # Arrange: a policy that has moved away from the sampler's and is flatter, and rewards of single tokens.
    generator = torch.Generator().manual_seed(0)
    behaviour = torch.randn(40, generator=generator, dtype=torch.float64)
    policy = (0.6 * behaviour + 0.7 * torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()
    reward = torch.randn(40, generator=generator, dtype=torch.float64)
    count = 200_000

    # Act
    tokens, sampled, support = drawn(behaviour.float(), count)
    current, _ = support_logprobs(
        policy.expand(count, -1), tokens, support.expand(count, -1).int(), temperature=1.0, with_entropy=False
    )
    ratio = (current - sampled).exp().detach()

    # Assert: the value and the gradient of the expected reward under the policy restricted to what was kept.
    kept = support[0][support[0] >= 0]
    q = torch.softmax(policy[kept], -1)
    expected = (q * reward[kept]).sum()
    (gradient,) = torch.autograd.grad(expected, policy)
    values = ratio * reward[tokens]
    assert near(values, expected.detach())
    assert near(ratio, torch.tensor(1.0, dtype=torch.float64))
    shares = torch.zeros(40, dtype=torch.float64).index_put((kept,), q.detach())
    estimates = values[:, None] * (torch.nn.functional.one_hot(tokens, 40) - shares)
    assert gradient.abs().max() > 0.1
    assert all(near(estimates[:, i], gradient[i]) for i in range(40))
    # With raw log-probs on both sides it is another number: ratios do not even average 1.
    raw = (torch.log_softmax(policy, -1) - torch.log_softmax(behaviour, -1)).exp().detach()[tokens]
    assert not near(raw, torch.tensor(1.0, dtype=torch.float64), deviations=20)
    assert not near(raw * reward[tokens], expected.detach(), deviations=20)


def near(samples: torch.Tensor, expected: torch.Tensor, deviations: float = 5) -> bool:
    error = samples.std() / len(samples) ** 0.5
    return bool((samples.mean() - expected).abs() <= deviations * error + 1e-12)
