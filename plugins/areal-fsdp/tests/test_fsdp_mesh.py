"""Every mesh equals one process: log-probs, loss, every gradient, gradient norm, parameters after two steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import fsdp_mesh_cases as mesh_cases
import pytest
import torch
import transformers
from fsdp_launch import launch
from fsdp_mesh_cases import Case
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.api.io_struct import SaveLoadMeta
from areal_core.trainer.world import World

ARCHES = ("qwen2", "qwen3", "llama", "gemma3")
#: A small selection on two ranks, in one launch.
FAST = [
    "qwen3/fsdp:t2",
    "qwen2/fsdp:t2/nosp",
    "gemma3/fsdp:c2",
    "qwen3/fsdp:c2/critic",
    "qwen3/fsdp:t2/supports/entropy",
    "llama/fsdp:c2/supports/entropy",
    "qwen2/fsdp:d2/empty/supports",
]
BROKEN = "qwen2/fsdp:d2/nan"
TINY = ["qwen3/fsdp:t2/tiny", "qwen3/fsdp:c2/tiny", "qwen3/fsdp:t2/critic/tiny"]
TINY_FOUR = ["qwen3/fsdp:t2c2/tiny", "qwen3/fsdp:d2t2/tiny", "qwen3/fsdp:d2c2/critic/tiny"]
#: Vocabularies of a loss alone: even, uneven, and with nothing for the second rank.
VOCABULARIES = [8, 61, 1]
TWO_RANKS = [
    f"{arch}/{layout}"
    for arch in ARCHES
    for layout in ("fsdp:d2", "fsdp:d2/empty", "fsdp:t2", "fsdp:t2/nosp", "fsdp:c2")
] + [
    "qwen3/fsdp:t2/critic",
    "qwen3/fsdp:t2/nosp/critic",
    "qwen3/fsdp:t2/lora",
    "llama/fsdp:t2/nosp/lora",
    "qwen3/fsdp:t2/lora/head",
    "qwen3/fsdp:c2/lora",
    "qwen2/fsdp:t2/recompute",
    "qwen2/fsdp:c2/recompute",
    "llama/fsdp:t2/entropy",
    "llama/fsdp:c2/entropy",
    "qwen2/fsdp:t2/unshared",
    "qwen2/fsdp:t2/nosp/sdpa",
    "gpt_oss/fsdp:c2",
    "qwen3/fsdp:d2/offload",
    "qwen3/fsdp:d2/wrap",
    "qwen2/fsdp:t2/ops",
    "qwen3/fsdp:c2/ops",
    "qwen3/fsdp:t2/adamw",
    "qwen3/fsdp:d2/reduce16/bf16",
    "qwen3/fsdp:t2/bf16",
    "qwen3/fsdp:c2/bf16",
]
#: More model types whose plan has only styles that are there.
PLANNED = [
    "mistral",
    "gemma",
    "gemma2",
    "olmo",
    "smollm3",
    "granite",
    "starcoder2",
    "cohere",
    "cohere2",
    "phi",
    "helium",
    "exaone4",
    "seed_oss",
    "arcee",
    "ernie4_5",
    "gpt_neox",
]
MORE_MODELS = [f"{arch}/fsdp:t2" for arch in PLANNED]
STORE = ["qwen2/fsdp:d2t2/store", "llama/fsdp:t2c2/nosp/store", "gemma3/fsdp:d4/hsdp/store"]
FOUR_RANKS = [
    f"{arch}/{layout}"
    for arch in ARCHES
    for layout in (
        "fsdp:d4",
        "fsdp:d4/hsdp",
        "fsdp:d2t2",
        "fsdp:d2t2/empty",
        "fsdp:d2c2",
        "fsdp:d2c2/empty",
        "fsdp:t2c2",
        "fsdp:t2c2/nosp",
    )
] + [
    "qwen3/fsdp:c4",
    "qwen2/fsdp:d2t2/hsdp",
    "llama/fsdp:d2c2/hsdp",
    "qwen3/fsdp:t2c2/critic",
    "qwen3/fsdp:d2t2/lora",
    "qwen2/fsdp:d2t2/adamw",
    "qwen2/fsdp:d2t2/muon",
    "llama/fsdp:t2c2/muon",
    "qwen3/fsdp:d2t2/supports/entropy",
    "gemma3/fsdp:t2c2/nosp/supports/entropy",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in (*ARCHES, "gpt_oss", *PLANNED):
        cases.make_folder(arch, folder / arch)
    for arch in ARCHES:
        cases.make_folder(arch, folder / f"{arch}-other", seed=1)
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> Callable[[Case], tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Results of a case in this process alone."""

    @functools.cache
    def run(case: Case) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        return mesh_cases.train(case, models / case.arch, World(0, 1, None))

    return lambda case: run(case.alone)


class Runs:
    """Launches all selected cases of a list at once, when the first is asked for: starting processes takes long."""

    def __init__(self, request: pytest.FixtureRequest, models: Path, factory: pytest.TempPathFactory) -> None:
        calls = (getattr(item, "callspec", None) for item in request.session.items)
        self.selected = {call.params.get("text") for call in calls if call is not None}
        self.models, self.factory = models, factory
        self.done: dict[int, Path] = {}

    def __call__(self, processes: int, texts: list[str], extra: Sequence[str] = ()) -> Path:
        if id(texts) not in self.done:
            out = self.factory.mktemp(f"ranks{processes}")
            chosen = [text for text in texts if text in self.selected]
            self.done[id(texts)] = out
            try:
                launch(processes, "fsdp_mesh_worker.py", out, [str(self.models), str(out), *extra, *chosen])
            except AssertionError as error:  # of one case: those before it have their results
                (out / "failure.txt").write_text(str(error))
        return self.done[id(texts)]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(request, models, tmp_path_factory)


@pytest.fixture(scope="module")
def fast(runs: Runs) -> Path:
    return runs(2, FAST, [*(f"vocab/{size}" for size in VOCABULARIES), BROKEN, *TINY])


def facts_of(text: str, out: Path) -> dict[str, Any]:
    path = out / f"{Case.parse(text).file}.json"
    if not path.exists():
        pytest.fail((out / "failure.txt").read_text())
    return json.loads(path.read_text())


def check(text: str, out: Path, reference: Callable[[Case], tuple[dict[str, float], dict[str, torch.Tensor]]]) -> None:
    case = Case.parse(text)
    numbers, tensors = reference(case)
    actual_numbers = facts_of(text, out)
    actual = load_file(out / f"{case.file}.safetensors")
    # There is something to compare, and the clipping is active.
    assert max(t.abs().max() for n, t in tensors.items() if n.startswith("gradient0.")) > 0.02
    assert numbers["grad_norm_0"] > mesh_cases.CLIP or case.arch not in ARCHES
    low = "bf16" in case.flags
    assert actual_numbers.keys() == numbers.keys()
    for name, value in numbers.items():
        assert actual_numbers[name] == pytest.approx(value, rel=0.05 if low else 1e-5, abs=1e-6), name
    assert actual.keys() == tensors.keys()
    for name, tensor in tensors.items():
        atol = 1e-6 if name.startswith("gradient") else 1e-5
        if low:
            atol = 0.1 * float(tensor.abs().max())
        assert_close(actual[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def test_train_batch_when_one_rank_has_a_nan_expected_every_rank_skips(fast: Path) -> None:
    facts = facts_of(BROKEN, fast)

    # Skipped, nothing changed, and the next step is taken.
    assert facts["ranks"] == [[1.0, 1.0, 0.0]] * 2


def test_train_batch_when_on_two_ranks_expected_no_warning_and_words_of_rank_0_alone(fast: Path) -> None:
    printed = [(fast / f"rank{rank}.log").read_text() for rank in range(2)]

    assert "step skipped" in printed[0]
    assert printed[1] == ""
    assert "Warning" not in printed[0]


@pytest.mark.parametrize("text", TINY)
def test_batches_when_hardly_there_on_two_ranks_expected_numbers_of_one(text: str, fast: Path, models: Path) -> None:
    check_tiny(text, fast, models)


@pytest.mark.slow
@pytest.mark.parametrize("text", TINY_FOUR)
def test_batches_when_hardly_there_on_four_ranks_expected_numbers_of_one(text: str, runs: Runs, models: Path) -> None:
    check_tiny(text, runs(4, TINY_FOUR), models)


def check_tiny(text: str, out: Path, models: Path) -> None:
    case = Case.parse(text)
    expected = mesh_cases.tiny(case.alone, models / case.arch, World(0, 1, None))

    assert facts_of(text, out) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected["two tokens: grad_norm"] > 0.1 and expected["untrained: update_skipped"] == 1


@pytest.mark.parametrize("text", FAST)
def test_training_when_on_two_ranks_expected_that_of_one(text: str, fast: Path, expected: Callable) -> None:
    check(text, fast, expected)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_support_logprobs_when_the_vocabulary_is_split_expected_formula_and_its_gradient(size: int, fast: Path) -> None:
    logits, targets, weights = mesh_cases.vocab_inputs(size)
    supports = mesh_cases.vocab_supports(size, targets)
    whole = logits.double().requires_grad_()
    rows = []
    for row, (target, kept) in enumerate(zip(targets.tolist(), supports.tolist(), strict=True)):
        ids = [i for i in kept if i >= 0]
        logp = torch.log_softmax(whole[row, ids] / 1.7, -1)
        rows.append(torch.stack([logp[ids.index(target)], -(logp.exp() * logp).sum()]))
    logprobs, entropy = torch.stack(rows, 1)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()

    ranks = [load_file(fast / f"vocab{size}-rank{rank}.safetensors") for rank in range(2)]

    for rank in ranks:
        assert_close(rank["kept_logprobs"], logprobs.detach().float(), rtol=1e-5, atol=1e-5)
        assert_close(rank["kept_entropy"], entropy.detach().float(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([rank["kept_gradient"] for rank in ranks], 1)
    assert_close(gradient, whole.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_vocab_parallel_logprobs_expected_formula_and_its_gradient(size: int, fast: Path) -> None:
    logits, targets, weights = mesh_cases.vocab_inputs(size)
    whole = logits.double().requires_grad_()
    logp = torch.log_softmax(whole / 1.7, -1)
    logprobs, entropy = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()

    ranks = [load_file(fast / f"vocab{size}-rank{rank}.safetensors") for rank in range(2)]

    for rank in ranks:
        assert_close(rank["logprobs"], logprobs.float(), rtol=1e-5, atol=1e-5)
        assert_close(rank["entropy"], entropy.float(), rtol=1e-5, atol=1e-5)
    assert [rank["gradient"].shape[1] for rank in ranks] == {8: [4, 4], 61: [31, 30], 1: [1, 0]}[size]
    gradient = torch.cat([rank["gradient"] for rank in ranks], 1)
    assert_close(gradient, whole.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all cases of a launch run in the first one's fixture
@pytest.mark.parametrize("text", TWO_RANKS)
def test_training_when_on_any_mesh_of_two_expected_that_of_one(text: str, runs: Runs, expected: Callable) -> None:
    check(text, runs(2, TWO_RANKS), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all cases of a launch run in the first one's fixture
@pytest.mark.parametrize("text", FOUR_RANKS)
def test_training_when_on_any_mesh_of_four_expected_that_of_one(text: str, runs: Runs, expected: Callable) -> None:
    out = runs(4, FOUR_RANKS)
    check(text, out, expected)
    # Parameters that are split twice are gathered in two steps, of which torch warns.
    assert all("redistributing" not in (out / f"rank{rank}.log").read_text() for rank in range(4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", MORE_MODELS)
def test_training_when_another_model_is_split_expected_that_of_one(text: str, runs: Runs, expected: Callable) -> None:
    check(text, runs(2, MORE_MODELS), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", STORE)
def test_save_and_load_when_on_a_mesh_expected_whole_weights_and_resume_in_one_process(
    text: str, runs: Runs, models: Path
) -> None:
    case, stored = Case.parse(text), runs(4, STORE)
    facts = facts_of(text, stored)
    tensors = load_file(stored / f"{case.file}.safetensors")
    saved = {n.removeprefix("saved."): t for n, t in tensors.items() if n.startswith("saved.")}
    straight = {n.removeprefix("straight."): t for n, t in tensors.items() if n.startswith("straight.")}
    plain = transformers.AutoModelForCausalLM.from_pretrained(models / case.arch)

    assert facts["resumed"] and facts["reloaded"] and facts["sent"] and facts["version"] == 7
    assert facts["moved"] < 1e-5
    assert facts["names"] == sorted(dict(plain.named_parameters()))  # tied ones once
    assert facts["loaded"] == pytest.approx(float(plain.model.norm.weight.sum()), abs=1e-6)
    assert {"config.json", "model.safetensors"} <= set(facts["files"])
    exported = transformers.AutoModelForCausalLM.from_pretrained(stored / f"{case.file}-hf")
    for name, value in exported.named_parameters():
        assert_close(saved[name], value, rtol=0, atol=0)
    # The mesh's training state goes on in one process.
    alone = mesh_cases.make(case.alone, models / f"{case.arch}-other", mesh_cases.momentum())
    alone.load(SaveLoadMeta(path=stored / f"{case.file}-dcp", weight_format="dcp", with_optim=True))
    assert_same(cases.parameters_of(alone), saved, 0)
    alone.train_batch(cases.ragged_batch(1), cases.policy_loss, cases.token_weight)
    assert_same(cases.parameters_of(alone), straight, 1e-5)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
