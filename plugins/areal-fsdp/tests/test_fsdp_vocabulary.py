"""Log-probs over the vocabulary in blocks: against the formula, and how much memory they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_fsdp import head as head_module
from areal_fsdp import linear_logprobs as module
from areal_fsdp.config import FSDPConfig
from areal_fsdp.linear_logprobs import linear_logprobs
from areal_fsdp.scorer import token_logprobs

TOKENS, VOCAB, HIDDEN = 23, 101, 7
TEMPERATURE = 0.7


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, targets, and a weight of each token in the loss, for log-probs and entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def soft_cap(logits: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(logits / 3)


def formula(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, capped: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    logp = ((soft_cap(logits) if capped else logits) / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("cached", [2**18, 40])
@pytest.mark.parametrize("entries", [1, TOKENS, 10 * TOKENS + 5, 10**6])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("capped", [False, True])
def test_linear_logprobs_when_in_blocks_expected_formula_and_its_gradient(
    capped: bool, with_entropy: bool, entries: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrange
    monkeypatch.setattr(module, "CACHED_ENTRIES", cached)
    hidden, weight, targets, scales = inputs(torch.float64)
    logprobs, entropies = formula(hidden, weight, targets, capped)
    loss = (logprobs * scales[0]).sum() + (entropies * scales[1]).sum() * with_entropy
    expected = torch.autograd.grad(loss, (hidden, weight))

    # Act
    ours, entropy = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=TEMPERATURE,
        with_entropy=with_entropy,
        entries=entries,
        after=soft_cap if capped else None,
    )
    loss = (ours * scales[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * scales[1]).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))

    # Assert
    assert_close(ours, logprobs, rtol=1e-12, atol=1e-12)
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        assert_close(entropy, entropies, rtol=1e-12, atol=1e-12)
    assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_linear_logprobs_when_checked_by_finite_differences_passes() -> None:
    hidden, weight, targets, _ = inputs(torch.float64)

    def both(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return linear_logprobs(hidden, weight, targets[:4] % 9, temperature=TEMPERATURE, with_entropy=True, entries=8)

    assert torch.autograd.gradcheck(both, (hidden[:4], weight[:9]))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_linear_logprobs_when_one_side_is_frozen_expected_the_gradient_of_the_other(frozen: str) -> None:
    hidden, weight, targets, scales = inputs(torch.float64)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    trained = weight if frozen == "hidden" else hidden
    (expected,) = torch.autograd.grad((formula(hidden, weight, targets)[1] * scales[1]).sum(), trained)

    _, entropy = linear_logprobs(hidden, weight, targets, temperature=TEMPERATURE, with_entropy=True, entries=99)
    assert entropy is not None
    (gradient,) = torch.autograd.grad((entropy * scales[1]).sum(), trained)

    assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_linear_logprobs_when_logits_are_far_apart_expected_no_overflow() -> None:
    hidden, weight, targets, _ = inputs(torch.float64)
    logprobs, entropies = formula(300 * hidden, weight, targets)

    ours, entropy = linear_logprobs(
        300 * hidden.float(), weight.float(), targets, temperature=TEMPERATURE, with_entropy=True, entries=99
    )

    assert logprobs.min() < -500
    assert_close(ours.double(), logprobs, rtol=1e-5, atol=1e-3)
    assert_close(entropy.double(), entropies, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_logprobs_when_bfloat16_expected_those_of_its_logits(autocast: bool) -> None:
    """Products are rounded as in the whole matrix; what follows is fp32."""
    hidden, weight, targets, scales = inputs(torch.float32 if autocast else torch.bfloat16)

    def run(score: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logprobs, entropy = score()
        assert entropy is not None
        loss = (logprobs * scales[0]).sum() + (entropy * scales[1]).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))]

    expected = run(lambda: token_logprobs(torch.nn.functional.linear(hidden, weight), targets, TEMPERATURE, True))
    ours = run(
        lambda: linear_logprobs(hidden, weight, targets, temperature=TEMPERATURE, with_entropy=True, entries=500)
    )

    assert ours[0].dtype == torch.float32
    assert_close(ours[:2], expected[:2], rtol=1e-6, atol=1e-5)
    assert [one.dtype for one in ours[2:]] == [hidden.dtype, weight.dtype]
    assert_close(ours[2:], expected[2:], rtol=2e-2, atol=2e-2)


def peak_of(function: Callable[[], None]) -> int:
    """The most bytes that are allocated at one time while it runs, beyond those before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("with_entropy", [True, False])
def test_linear_logprobs_when_allocations_are_counted_expected_a_tenth_of_the_whole_matrix(with_entropy: bool) -> None:
    # Arrange: entries in the proportion of LOGITS_AT_ONCE to 4,096 tokens and 151,936 entries.
    tokens, vocab = 256, 6000
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    entries = tokens * vocab * module.LOGITS_AT_ONCE // (4096 * 151_936)

    def step(score: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        logprobs, entropy = score()
        (logprobs.sum() + (0.0 if entropy is None else entropy.sum())).backward()
        hidden.grad = weight.grad = None

    # Act
    whole = peak_of(lambda: step(lambda: token_logprobs(hidden @ weight.T, targets, 1.0, with_entropy)))
    blocks = peak_of(
        lambda: step(
            lambda: linear_logprobs(
                hidden, weight, targets, temperature=1.0, with_entropy=with_entropy, entries=entries
            )
        )
    )

    # Assert: gradients included
    matrix = 4 * tokens * vocab
    assert whole >= 3 * matrix, "the count misses something"
    assert blocks < 0.1 * whole
    assert blocks < 0.12 * matrix


class Largest(TorchDispatchMode):
    """The most elements that a tensor had of those that operations returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def entropy_loss(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    assert output.entropy is not None
    return LossOutput(((output.entropy - output.logprobs) * batch["loss_mask"]).sum())


@pytest.mark.parametrize("case", ["blocks", "capped blocks", "chunks"])
def test_engine_when_the_vocabulary_is_large_makes_no_matrix_of_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrange: gemma3 caps its logits; what a hook does to them is not known. By default, whatever the vocabulary.
    monkeypatch.setitem(cases._COMMON, "vocab_size", 5000)
    monkeypatch.setattr("areal_fsdp.scorer.LOGITS_AT_ONCE", 20_000)
    arch = "gemma3" if case == "capped blocks" else "llama"
    engine = cases.make_engine(cases.make_folder(arch, tmp_path), optimizer=cases.sgd())
    if case == "chunks":
        engine.model.lm_head.register_forward_hook(lambda *_: None)
    batch = cases.ragged_batch()
    predicted = int(batch["loss_mask"].sum())
    weights = 5000 * 32

    # Act
    with Largest() as seen:
        engine.forward(batch, with_entropy=True)
        engine.train_batch(batch, entropy_loss, cases.token_weight, with_entropy=True)

    # Assert
    assert predicted * 5000 > 2 * weights, "otherwise the limit says nothing"
    assert seen.elements == weights


@pytest.mark.parametrize(
    ("arch", "plain"),
    [
        ("qwen2", True),
        ("llama", True),
        ("gemma3", False),
        pytest.param("granite", False, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
    ],
)
def test_head_when_it_is_a_product_and_a_function_of_single_logits_gives_both(
    arch: str, plain: bool, tmp_path: Path
) -> None:
    scorer = cases.make_engine(cases.make_folder(arch, tmp_path)).ready()
    hidden = torch.randn(3, 32)

    linear = scorer.head.linear(hidden)

    assert linear is not None and (linear.after is None) == plain
    logits = hidden @ linear.weight.T
    assert_close(scorer.logits(hidden), logits if linear.after is None else linear.after(logits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["bias", "hook", "scaled input", "normalised"])
def test_head_when_it_is_anything_else_gives_none(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrange
    scorer = cases.make_engine(cases.make_folder("llama", tmp_path)).ready()
    model, original = scorer.model, type(scorer.model).forward
    if case == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(cases.VOCAB))
    elif case == "hook":
        model.lm_head.register_forward_hook(lambda *_: None)
    elif case == "scaled input":
        stub = head_module._GivenHidden
        given = stub.forward
        monkeypatch.setattr(stub, "forward", lambda self, **kwargs: head_module._HiddenOnly(given(self)[0] / 2))
    else:

        def forward(self: Any, **kwargs: Any) -> Any:
            output = original(self, **kwargs)
            output.logits = output.logits - output.logits.mean(-1, keepdim=True)
            return output

        monkeypatch.setattr(type(model), "forward", forward)

    # Act
    linear = scorer.head.linear(torch.randn(3, 32))

    # Assert
    assert linear is None


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_train_batch_when_in_blocks_or_chunks_expected_gradients_of_the_whole(arch: str, tmp_path: Path) -> None:
    folder, batch = cases.make_folder(arch, tmp_path), cases.ragged_batch()

    def step(chunk: int | None) -> Any:
        engine = cases.make_engine(folder, optimizer=cases.sgd(), options=FSDPConfig(logits_chunk_tokens=chunk))
        before = cases.parameters_of(engine)
        engine.train_batch(batch, entropy_loss, cases.token_weight, with_entropy=True)
        return {name: before[name] - value for name, value in cases.parameters_of(engine).items()}

    whole, parts = step(None), step(5)

    assert max(value.abs().max() for value in whole.values()) > 1e-3
    assert_close(parts, whole, rtol=1e-4, atol=1e-6)
