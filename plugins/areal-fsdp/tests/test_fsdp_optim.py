"""Optimizers, schedules and skipped steps, against torch's own or against the formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import transformers
from torch.testing import assert_close

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.configs import OptimizerConfig
from areal_core.api.io_struct import FinetuneSpec, SaveLoadMeta
from areal_core.errors import ArealError, BadInputError
from areal_fsdp import muon
from areal_fsdp.grad_norm import grad_norm
from areal_fsdp.low_precision import LowPrecisionAdamW, round_stochastically
from areal_fsdp.mesh import Mesh
from areal_fsdp.optim import build_optimizer
from areal_fsdp.schedules import Schedule


def tiny_model(arch: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(cases.model_config(arch), dtype=dtype)


# ------------------------------------------------------------------------------------------------------ schedules

STEPS, WARMUP, FLOOR, DECAY = 20, 4, 0.1, 0.25


def linear(k: int) -> float:
    return FLOOR + (1 - FLOOR) * (STEPS - k) / (STEPS - WARMUP)


def cosine(k: int) -> float:
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (k - WARMUP) / (STEPS - WARMUP))) / 2


def wsd(k: int) -> float:
    first = STEPS - round(DECAY * STEPS)  # the last step of the plateau has index first - 1
    return 1.0 if k < first else FLOOR + (1 - FLOOR) * (STEPS - 1 - k) / (STEPS - first)


@pytest.mark.parametrize(
    ("shape", "formula"), [("constant", lambda k: 1.0), ("linear", linear), ("cosine", cosine), ("wsd", wsd)]
)
@pytest.mark.parametrize("warmup", [{"warmup_steps": WARMUP}, {"warmup_steps_proportion": WARMUP / STEPS}], ids=str)
def test_schedule_when_stepped_expected_its_formula(shape: Any, formula: Any, warmup: dict[str, Any]) -> None:
    config = OptimizerConfig(
        lr=0.5, lr_scheduler_type=shape, min_lr_ratio=FLOOR, decay_steps_proportion=DECAY, **warmup
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=STEPS, train_batch_size=1)
    schedule = Schedule(optimizer, config, spec)

    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()

    expected = [0.5 * ((k + 1) / WARMUP if k < WARMUP else formula(k)) for k in range(STEPS)]
    assert found == pytest.approx(expected)
    if shape == "wsd":
        assert found[-1] == pytest.approx(0.5 * FLOOR)  # it arrives


def test_schedule_when_wsd_is_all_warmup_and_decay_expected_no_plateau() -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type="wsd", warmup_steps=6, decay_steps_proportion=1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    schedule = Schedule(optimizer, config, FinetuneSpec(total_train_epochs=1, dataset_size=10, train_batch_size=1))

    factors = [schedule.factor(k) for k in range(10)]

    assert factors == pytest.approx([*((k + 1) / 6 for k in range(6)), 0.75, 0.5, 0.25, 0.0])


# ------------------------------------------------------------------------------------------- SGD, AdamW with options


def test_sgd_when_momentum_expected_torch_sgd() -> None:
    model = tiny_model()
    config = OptimizerConfig(type="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)

    optimizer = build_optimizer(model, config)

    assert isinstance(optimizer, torch.optim.SGD)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}


def reference_adamw(
    weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float, betas: tuple[float, float], eps: float
) -> torch.Tensor:
    """AdamW in fp64, as the paper writes it."""
    weight, first, second = weight.double(), torch.zeros(()), torch.zeros(())
    for t, gradient in enumerate((g.double() for g in gradients), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        step = (first / (1 - betas[0] ** t)) / ((second / (1 - betas[1] ** t)).sqrt() + eps)
        weight = weight - lr * (step + decay * weight)
    return weight


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_low_precision_adamw_when_all_is_fp32_expected_formula(state_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, 7))
    gradients = [torch.randn(5, 7) for _ in range(6)]
    expected = reference_adamw(parameter.detach(), gradients, 1e-2, 0.1, (0.9, 0.95), 1e-8)
    optimizer = LowPrecisionAdamW(
        [{"params": [parameter], "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=state_dtype,
        rounding="none",
    )

    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()

    assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rounding", ["none", "kahan", "stochastic"])
def test_bf16_parameters_when_updates_are_tiny_expected_only_none_stalls(rounding: Any) -> None:
    # Each step moves a weight of 1 by 1e-4, a fortieth of the gap between bf16 numbers below 1.
    parameter = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = LowPrecisionAdamW(
        [{"params": [parameter]}],
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=torch.float32,
        rounding=rounding,
    )

    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    moved = (1 - parameter.detach().float().mean()).item()
    assert moved == (0.0 if rounding == "none" else pytest.approx(0.02, rel=0.05))


@pytest.mark.parametrize("rounding", ["none", "kahan", "stochastic"])
def test_state_dtype_when_bfloat16_expected_half_the_memory_and_nearly_the_same_steps(rounding: Any) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if rounding == "kahan" else torch.float32
    start = torch.randn(64, 64).to(dtype)
    gradients = [torch.randn(64, 64) + 0.5 for _ in range(20)]
    expected = reference_adamw(start, gradients, 1e-2, 0.0, (0.9, 0.95), 1e-8)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = LowPrecisionAdamW(
        [{"params": [parameter]}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        state_dtype=torch.bfloat16,
        rounding=rounding,
    )

    for gradient in gradients:
        parameter.grad = gradient.to(dtype)
        optimizer.step()

    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    moved = (expected - start.double()).abs().mean()
    assert (parameter.detach().double() - expected).abs().mean() < 0.05 * moved


def test_round_stochastically_when_between_two_numbers_expected_neighbours_and_exact_mean() -> None:
    value = torch.full((1 << 16,), 1.0 + 0.3 * 2**-7)  # bf16 has 1 and 1 + 2^-7 here

    rounded = round_stochastically(value, torch.Generator().manual_seed(1)).float()

    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert (rounded.mean() - 1).item() == pytest.approx(0.3 * 2**-7, rel=0.03)
    exact = torch.tensor([0.0, -1.5, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(exact, torch.Generator()).float(), exact)
    assert round_stochastically(torch.tensor([float("nan")]), torch.Generator()).isnan().all()


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_resume_when_bf16_expected_bitwise_continuation(rounding: Any, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    config = OptimizerConfig(lr=1e-2, state_dtype="bfloat16", rounding=rounding)
    kinds = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    engine = cases.make_engine(folder, optimizer=config, **kinds)
    for step in range(2):
        engine.train_batch(cases.ragged_batch(step), cases.policy_loss, cases.token_weight)
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)
    engine.save(meta)
    engine.train_batch(cases.ragged_batch(2), cases.policy_loss, cases.token_weight)
    other = cases.make_engine(folder, optimizer=config, **kinds)

    other.load(meta)
    other.train_batch(cases.ragged_batch(2), cases.policy_loss, cases.token_weight)

    expected = cases.parameters_of(engine)
    assert all(torch.equal(expected[k], v) for k, v in cases.parameters_of(other).items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounding": "kahan"}, "optimizer.rounding: kahan.*param_dtype"),
        ({"rounding": "stochastic"}, "optimizer.rounding: nothing is bfloat16"),
        ({"rounding": "stochastic", "type": "sgd"}, "optimizer.rounding: is an option of type adamw, not of sgd"),
        ({"state_dtype": "bfloat16", "type": "muon"}, "optimizer.state_dtype: is an option of type adamw"),
    ],
    ids=str,
)
def test_build_optimizer_when_options_do_not_fit_expected_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        build_optimizer(tiny_model(), OptimizerConfig(**fields))


# ----------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_orthogonalise_when_random_matrix_expected_the_quintic_on_its_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = muon.COEFFICIENTS
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5

    found = muon.orthogonalise(matrix)

    assert_close(found, u @ torch.diag(s) @ v, rtol=0, atol=1e-10)
    assert s.min() > 0.3 and s.max() < 1.3  # nearly orthogonal


def test_muon_when_bf16_iterations_expected_torch_muon_exactly() -> None:
    torch.manual_seed(0)
    start = [torch.randn(12, 20), torch.randn(30, 8)]
    mine = [torch.nn.Parameter(p.clone()) for p in start]
    theirs = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = muon.Muon(
        [{"params": mine, "muon": True, "weight_decay": 0.1}],
        lr=0.02,
        momentum=0.95,
        betas=(0.9, 0.95),
        eps=1e-8,
        precision=torch.bfloat16,
    )
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.1, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )

    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()

    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3_moe"])  # tied, untied, experts
def test_build_optimizer_when_muon_expected_hidden_matrices_only(arch: str) -> None:
    model = tiny_model(arch)

    optimizer = build_optimizer(model, OptimizerConfig(type="muon", weight_decay=0.1))

    names = {id(p): n for n, p in model.named_parameters()}
    chosen = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"]}
    assert chosen.keys() == set(names.values())
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and ".layers." in name
        assert chosen[name]["muon"] == hidden, name
        assert chosen[name]["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0), name
    assert any(g["muon"] for g in chosen.values())


def test_build_optimizer_when_muon_trains_a_critic_expected_adamw_for_its_head(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), role="critic", optimizer=cases.sgd())

    optimizer = build_optimizer(engine.model, OptimizerConfig(type="muon"))

    chosen = {id(p): group["muon"] for group in optimizer.param_groups for p in group["params"]}
    matrices = {name: chosen[id(p)] for name, p in engine.model.named_parameters() if p.ndim == 2}
    assert matrices == {name: ".layers." in name for name in matrices}
    assert matrices["score.weight"] is False


def test_train_batch_when_muon_expected_muon_and_adamw_side_by_side(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    engine = cases.make_engine(
        folder, optimizer=OptimizerConfig(type="muon", lr=1e-2, weight_decay=0.1, gradient_clipping=0.0)
    )
    reference = cases.load_reference(folder)
    hidden = {n: p for n, p in reference.named_parameters() if p.ndim == 2 and ".layers." in n}
    buffers = {n: torch.zeros_like(p) for n, p in hidden.items()}
    rest = [p for n, p in reference.named_parameters() if n not in hidden]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )

    for seed in range(2):
        batch = cases.ragged_batch(seed)
        engine.train_batch(batch, cases.policy_loss, cases.token_weight)
        reference.zero_grad()
        logprobs, _ = cases.reference_logprobs(reference, batch)
        (cases.policy_loss(TokenOutput(logprobs), batch).loss / cases.token_weight(batch)).backward()
        adamw.step()
        with torch.no_grad():
            for name, parameter in hidden.items():
                buffers[name] = 0.95 * buffers[name] + 0.05 * parameter.grad
                update = muon.orthogonalise(0.05 * parameter.grad + 0.95 * buffers[name])
                parameter *= 1 - 1e-2 * 0.1
                parameter -= 1e-2 * 0.2 * math.sqrt(max(parameter.shape)) * update

    found = cases.parameters_of(engine)
    for name, parameter in hidden.items():
        assert_close(found[name].double(), parameter.detach(), rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")
    for parameter, name in ((p, n) for n, p in reference.named_parameters() if n not in hidden):
        # AdamW turns a gradient near 0 into a step of either sign: a few elements may differ by more.
        assert ((found[name] - parameter.detach()).abs() > 2e-5).float().mean() < 0.01, name


def test_resume_when_muon_expected_bitwise_continuation(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    config = OptimizerConfig(type="muon", lr=1e-2)
    engine = cases.make_engine(folder, optimizer=config)
    engine.train_batch(cases.ragged_batch(0), cases.policy_loss, cases.token_weight)
    meta = SaveLoadMeta(path=tmp_path / "dcp", weight_format="dcp", with_optim=True)
    engine.save(meta)
    first = engine.train_batch(cases.ragged_batch(1), cases.policy_loss, cases.token_weight)
    second = engine.train_batch(cases.ragged_batch(2), cases.policy_loss, cases.token_weight)
    other = cases.make_engine(folder, optimizer=config)

    other.load(meta)

    assert other.train_batch(cases.ragged_batch(1), cases.policy_loss, cases.token_weight) == first
    assert other.train_batch(cases.ragged_batch(2), cases.policy_loss, cases.token_weight) == second


# --------------------------------------------------------------------------------------------------- skipped steps


def exploding(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    return LossOutput((output.logprobs / torch.zeros_like(output.logprobs)).sum())


def test_train_batch_when_max_skipped_in_a_row_expected_error_and_finite_weights(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path), optimizer=OptimizerConfig(lr=1e-3, max_skipped=3))
    batch, weight = cases.ragged_batch(), cases.token_weight

    for _ in range(2):
        assert engine.train_batch(batch, exploding, weight)["update_skipped"] == 1
    engine.train_batch(batch, cases.policy_loss, weight)  # a good step starts the count again
    for _ in range(2):
        assert engine.train_batch(batch, exploding, weight)["update_skipped"] == 1
    engine.train_batch(batch.select([]), cases.policy_loss, weight)  # nothing to learn: does not count
    with pytest.raises(ArealError, match=r"optimizer\.max_skipped: .* not finite in 3 steps in a row") as caught:
        engine.train_batch(batch, exploding, weight)

    assert not isinstance(caught.value, BadInputError)  # a failed run, not bad input
    assert all(p.isfinite().all() for p in cases.parameters_of(engine).values())


def test_train_batch_when_max_skipped_is_null_expected_no_end(tmp_path: Path) -> None:
    engine = cases.make_engine(
        cases.make_folder("qwen2", tmp_path), optimizer=OptimizerConfig(lr=1e-3, max_skipped=None)
    )

    for _ in range(12):
        result = engine.train_batch(cases.make_batch([[3]]), exploding, cases.token_weight)

    assert result["update_skipped"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grad_norm_when_gradients_have_few_bits_expected_that_of_exact_sums(dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (300, 7000)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1000.0)  # a norm beyond the range of fp16

    norm = grad_norm(parameters, Mesh(device=torch.device("cpu")))

    assert norm.item() == pytest.approx(1000 * 7300**0.5, rel=1e-6)
