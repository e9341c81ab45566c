"""Loss and gradients of ``train_batch`` against plain autograd over single sequences in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from torch.testing import assert_close

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import OptimizerConfig
from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig


def assert_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert max(g.abs().max() for g in expected.values()) > 5e-3
    for name, gradient in expected.items():
        assert_close(
            actual[name], gradient.float(), rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "arch",
    [
        "qwen2",
        "qwen3",
        "llama",
        "gemma3",
        *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("gemma2", "gpt_oss")),
    ],
)
def test_train_batch_when_one_step_expected_reference_loss_and_gradients(
    arch: str, share: bool, tmp_path: Path
) -> None:
    folder = cases.make_folder(arch, tmp_path)
    batch = cases.ragged_batch()
    loss, gradients = cases.reference_step(folder, batch)
    engine = cases.make_engine(folder, optimizer=cases.sgd(), options=FSDPConfig(share_prompts=share))

    result, actual = cases.step_difference(engine, batch)

    assert_gradients(actual, gradients)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert result["update_skipped"] == 0


@pytest.mark.parametrize(
    "variant",
    [
        {"max_tokens": 1},
        {"max_tokens": 30},
        {"max_tokens": 70},
        {"options": FSDPConfig(logits_chunk_tokens=9)},
        {"gradient_checkpointing": True, "max_tokens": 40},
        {"temperature": 1.7},
        {"attn_impl": "sdpa"},
    ],
    ids=str,
)
def test_train_batch_when_computed_another_way_expected_same_gradients(variant: dict[str, Any], tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.ragged_batch()
    loss, gradients = cases.reference_step(folder, batch, temperature=variant.get("temperature", 1.0))
    engine = cases.make_engine(folder, optimizer=cases.sgd(), **variant)

    result, actual = cases.step_difference(engine, batch)

    assert_gradients(actual, gradients)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_train_batch_when_entropy_asked_expected_its_gradient(tmp_path: Path) -> None:
    folder = cases.make_folder("llama", tmp_path)
    batch = cases.ragged_batch()
    reference = cases.load_reference(folder)
    _, entropies = cases.reference_logprobs(reference, batch)
    (-entropies.sum() / cases.token_weight(batch)).backward()
    engine = cases.make_engine(folder, optimizer=cases.sgd(), options=FSDPConfig(logits_chunk_tokens=16))

    def entropy_bonus(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        assert output.entropy is not None
        return LossOutput(-output.entropy.sum())

    before = cases.parameters_of(engine)
    engine.train_batch(batch, entropy_bonus, cases.token_weight, with_entropy=True)
    after = cases.parameters_of(engine)

    assert_gradients(
        {name: before[name] - after[name] for name in before},
        {name: p.grad for name, p in reference.named_parameters()},
    )


def test_train_batch_when_prompts_are_shared_expected_fewer_model_tokens(tmp_path: Path) -> None:
    batch = cases.make_batch([[3, 3, 3, 3]], prompt=(10, 11))
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=cases.sgd(lr=0.0))

    engine.train_batch(batch, cases.policy_loss, cases.token_weight)

    stats = engine.export_stats()
    assert stats["train_tokens"] == 52
    assert stats["model_tokens"] == 10 + 4 * 3
    assert engine.export_stats()["train_tokens"] == 0


@pytest.mark.parametrize("case", ["trained prompt", "other prompt", "no ids"])
def test_train_batch_when_prompt_cannot_be_shared_expected_reference_gradients(case: str, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)
    batch = cases.make_batch([[3, 5, 4], [6, 2]], prompt=(6, 7))
    if case == "trained prompt":
        mask = batch.tokens["loss_mask"].clone()
        mask[3] = True
        batch = batch.with_tokens(loss_mask=mask)
    elif case == "other prompt":
        ids = batch.tokens["input_ids"].clone()
        ids[2] = (ids[2] + 1) % cases.VOCAB
        batch = batch.with_tokens(input_ids=ids)
    else:
        batch = PackedBatch(batch.cu_seqlens, batch.tokens)
    _, gradients = cases.reference_step(folder, batch)
    engine = cases.make_engine(folder, optimizer=cases.sgd())

    _, actual = cases.step_difference(engine, batch)

    assert_gradients(actual, gradients)
    total = batch.num_tokens
    shared = engine.export_stats()["model_tokens"]
    expected = {"trained prompt": total - 6, "other prompt": total - 6, "no ids": total}
    assert shared == expected[case]


def test_train_batch_when_gradient_is_not_finite_expected_skipped_and_unchanged(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=OptimizerConfig(lr=0.1))
    before = cases.parameters_of(engine)

    def exploding(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        return LossOutput((output.logprobs / torch.zeros_like(output.logprobs)).sum())

    result = engine.train_batch(cases.ragged_batch(), exploding, cases.token_weight)

    assert result["update_skipped"] == 1
    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())
    assert engine.export_stats()["update_skipped"] == 1
    after = engine.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)
    assert after["update_skipped"] == 0


@pytest.mark.parametrize("empty", ["no sequences", "no trained tokens"])
def test_train_batch_when_total_weight_is_zero_expected_skipped(empty: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=OptimizerConfig(lr=0.1))
    batch = cases.ragged_batch()
    if empty == "no sequences":
        batch = batch.select([])
    else:
        batch = batch.with_tokens(loss_mask=torch.zeros_like(batch["loss_mask"]))
    before = cases.parameters_of(engine)

    result = engine.train_batch(batch, cases.policy_loss, cases.token_weight)

    assert result["update_skipped"] == 1
    assert result["loss"] == 0
    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())


def test_train_batch_when_clipped_expected_step_of_clipped_length(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)
    _, gradients = cases.reference_step(folder, cases.ragged_batch())
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    engine = cases.make_engine(folder, optimizer=cases.sgd(gradient_clipping=float(norm) / 2))

    result, actual = cases.step_difference(engine, cases.ragged_batch())

    assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, gradient in gradients.items():
        assert_close(actual[name], gradient.float() / 2, rtol=1e-4, atol=2e-6)


def test_train_batch_when_norm_is_below_the_bound_expected_the_gradient_itself(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)
    _, gradients = cases.reference_step(folder, cases.ragged_batch())
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    engine = cases.make_engine(folder, optimizer=cases.sgd(gradient_clipping=float(norm) * 3))

    _, actual = cases.step_difference(engine, cases.ragged_batch())

    assert_gradients(actual, gradients)


def test_train_batch_when_a_loss_reports_maxima_expected_those_over_all_micro_batches(tmp_path: Path) -> None:
    batch = cases.ragged_batch()
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=cases.sgd(lr=0.0), max_tokens=30)
    calls = 0

    def loss_fn(output: TokenOutput, micro_batch: PackedBatch) -> LossOutput:
        nonlocal calls
        calls += 1
        return LossOutput(output.logprobs.sum(), {}, {"advantage": micro_batch["advantages"].max()})

    result = engine.train_batch(batch, loss_fn, cases.token_weight)

    assert calls > 2
    assert result["advantage_max"] == pytest.approx(batch["advantages"].max().item(), rel=1e-6)


def test_train_batch_when_adamw_expected_torch_adamw_without_decay_on_vectors(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)
    reference = cases.load_reference(folder, dtype=torch.float32)
    decayed = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, gradient_clipping=0.0)
    engine = cases.make_engine(folder, optimizer=config)

    for seed in range(2):
        batch = cases.ragged_batch(seed)
        engine.train_batch(batch, cases.policy_loss, cases.token_weight)
        logprobs, _ = cases.reference_logprobs(reference, batch)
        optimizer.zero_grad()
        (cases.policy_loss(TokenOutput(logprobs), batch).loss / cases.token_weight(batch)).backward()
        optimizer.step()

    actual = cases.parameters_of(engine)
    for name, parameter in reference.named_parameters():
        # AdamW turns a gradient near 0 into a step of either sign: a few elements may differ by more.
        difference = (actual[name] - parameter.detach()).abs()
        assert (difference > 2e-5).float().mean() < 0.01, name
        assert difference.max() < 1e-3, name


def test_eval_batch_when_called_expected_train_loss_and_no_change(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen3", tmp_path), optimizer=cases.sgd(lr=0.0), max_tokens=50)
    batch = cases.ragged_batch()
    before = cases.parameters_of(engine)

    evaluated = engine.eval_batch(batch, cases.policy_loss, cases.token_weight)
    trained = engine.train_batch(batch, cases.policy_loss, cases.token_weight)

    mask = batch["loss_mask"]
    assert evaluated["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    assert evaluated["tokens"] == pytest.approx(mask.float().mean().item())
    logprobs = engine.forward(batch).logprobs
    assert evaluated["logprob"] == pytest.approx(logprobs[mask].mean().item(), rel=1e-5)
    assert all(torch.equal(before[k], v) for k, v in cases.parameters_of(engine).items())
    assert {"loss", "logprob", "tokens"} == evaluated.keys()


def test_train_batch_when_bfloat16_expected_loss_falls(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-2)
    engine = cases.make_engine(cases.make_folder("qwen3", tmp_path), dtype="bfloat16", optimizer=optimizer)

    def likelihood(output: TokenOutput, batch: PackedBatch) -> LossOutput:
        return LossOutput(-output.logprobs.sum())

    losses = [engine.train_batch(cases.ragged_batch(), likelihood, cases.token_weight)["loss"] for _ in range(8)]

    assert losses[-1] < losses[0] - 0.5
    assert next(engine.model.parameters()).dtype == torch.float32


def test_train_batch_when_no_optimizer_expected_error(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path))

    with pytest.raises(BadInputError, match="optimizer"):
        engine.train_batch(cases.ragged_batch(), cases.policy_loss, cases.token_weight)


@pytest.mark.parametrize("arch", ["gpt2", "opt"])
def test_train_batch_when_the_model_has_dropout_expected_logprobs_of_forward(arch: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder(arch, tmp_path), optimizer=cases.sgd(lr=0.5))
    batch = cases.ragged_batch()
    expected = engine.forward(batch).logprobs
    seen: list[torch.Tensor] = []

    def loss(output: TokenOutput, micro_batch: PackedBatch) -> LossOutput:
        seen.append(output.logprobs.detach())
        return cases.policy_loss(output, micro_batch)

    engine.train_batch(batch, loss, cases.token_weight)

    assert_close(seen[0], expected, rtol=0, atol=1e-6)


def test_train_batch_when_pairs_are_in_small_micro_batches_expected_both_sides_in_each(tmp_path: Path) -> None:
    batch = cases.make_batch([[6], [4], [9], [3], [5], [7]], prompt=(5, 6))
    # No pair fits the budget, most sides do.
    pairs = PackedBatch(
        batch.cu_seqlens, batch.tokens, {**batch.rows, "pair_ids": torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int64)}
    )
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=cases.sgd(), max_tokens=16)
    seen: list[list[int]] = []

    def loss_fn(output: TokenOutput, micro_batch: PackedBatch) -> LossOutput:
        seen.append(micro_batch["pair_ids"].tolist())
        return cases.policy_loss(output, micro_batch)

    engine.train_batch(pairs, loss_fn, cases.token_weight)

    assert sorted(seen) == [[0, 0], [1, 1], [2, 2]]


def test_train_batch_when_the_loss_reads_logits_expected_those_at_the_temperature(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.ragged_batch()
    logprobs, entropies = cases.reference_logprobs(cases.load_reference(folder), batch, temperature=1.7)
    options = FSDPConfig(logits_chunk_tokens=9)
    engine = cases.make_engine(folder, optimizer=cases.sgd(), temperature=1.7, options=options)
    seen: list[TokenOutput] = []

    def entropy(micro_batch: PackedBatch, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)

    def loss_fn(output: TokenOutput, micro_batch: PackedBatch) -> LossOutput:
        seen.append(output)
        assert output.of_logits is not None
        return LossOutput(output.of_logits.sum())

    engine.train_batch(batch, loss_fn, cases.token_weight, logits_fn=entropy)

    (output,) = seen
    assert output.of_logits is not None
    assert_close(output.logprobs.detach(), logprobs.detach().float(), rtol=0, atol=1e-5)
    assert_close(output.of_logits.detach(), entropies.detach().float(), rtol=0, atol=1e-5)
