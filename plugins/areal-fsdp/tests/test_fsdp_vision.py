"""Vision-language models: packed texts with 0, 1 and 2 images against transformers, one sequence at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import fsdp_vision_cases as vision
import pytest
import torch
import transformers
from fsdp_launch import launch
from fsdp_vision_worker import SPLITS
from safetensors.torch import load_file
from torch.testing import assert_close

from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig

Step = tuple[float, torch.Tensor, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for arch in (*vision.ARCHITECTURES, "gemma3"):
        vision.make_folder(arch, folder / arch)
    return folder


@pytest.fixture(scope="module")
def references(models: Path) -> dict[str, Step]:
    return {arch: vision.reference_step(models / arch, vision.make_batch()) for arch in vision.ARCHITECTURES}


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vision-d2")
    launch(2, "fsdp_vision_worker.py", out, [str(models), str(out)])
    return out


def assert_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert max(g.abs().max() for name, g in expected.items() if "vis" in name) > 2e-3  # there is something to compare
    for name, value in expected.items():
        assert_close(actual[name].double(), value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("arch", vision.ARCHITECTURES)
def test_train_batch_when_texts_have_images_expected_loss_and_gradients_of_single_sequences(
    arch: str, share: bool, models: Path, references: dict[str, Step]
) -> None:
    loss, logprobs, expected = references[arch]
    options = FSDPConfig(share_prompts=share)
    engine = cases.make_engine(models / arch, optimizer=cases.sgd(), options=options, max_tokens=60)

    output = engine.forward(vision.make_batch())
    result, gradients = cases.step_difference(engine, vision.make_batch())

    assert engine.ready().is_packed
    assert_close(output.logprobs.double(), logprobs, rtol=0, atol=1e-5)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert_gradients(gradients, expected)
    # Two completions of the prompt with two images, and one of the prompt without, need not compute theirs.
    assert (engine.export_stats()["model_tokens"] < vision.make_batch().num_tokens) == share


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("arch", vision.ARCHITECTURES)
def test_train_batch_when_a_rank_has_no_image_expected_loss_and_gradients_of_single_sequences(
    arch: str, split: str, two_ranks: Path, references: dict[str, Step]
) -> None:
    loss, logprobs, expected = references[arch]

    result = json.loads((two_ranks / f"{arch}-{split}.json").read_text())
    tensors = load_file(two_ranks / f"{arch}-{split}.safetensors")

    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert_gradients(tensors, expected)
    sequences = torch.split(logprobs, vision.make_batch().seqlens.tolist())
    own = torch.cat([sequences[i] for i in SPLITS[split][0]])
    assert_close(tensors["logprobs"].double(), own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", vision.ARCHITECTURES)
def test_save_when_vision_model_is_sharded_expected_exact_weights(arch: str, models: Path, two_ranks: Path) -> None:
    saved = transformers.AutoModelForImageTextToText.from_pretrained(two_ranks / arch)
    original = transformers.AutoModelForImageTextToText.from_pretrained(models / arch)

    assert saved.state_dict().keys() == original.state_dict().keys()
    for name, value in original.state_dict().items():
        assert_close(saved.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("qwen2_5_vl", {"attn_impl": "sdpa"}),
        ("qwen3_vl", {"gradient_checkpointing": True}),
        # Its image tokens attend to each other in both directions, which packed attention cannot say.
        ("gemma3", {}),
    ],
)
def test_train_batch_when_padded_or_recomputed_expected_gradients_of_single_sequences(
    arch: str, fields: dict[str, Any], models: Path
) -> None:
    batch = vision.make_batch(arch=arch)
    loss, _, expected = vision.reference_step(models / arch, batch)
    engine = cases.make_engine(models / arch, optimizer=cases.sgd(), max_tokens=60, **fields)

    result, gradients = cases.step_difference(engine, batch)

    assert engine.ready().is_packed == (arch == "qwen3_vl")
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert_gradients(gradients, expected)


def test_train_batch_when_text_only_expected_vision_tower_unchanged(models: Path) -> None:
    engine = cases.make_engine(models / "qwen3_vl", optimizer=cases.sgd(), max_tokens=60)

    _, gradients = cases.step_difference(engine, vision.make_batch().select([3, 4, 6]))

    assert gradients["lm_head.weight"].abs().max() > 0.01
    assert all(bool((g == 0).all()) for name, g in gradients.items() if "visual" in name)


def test_initialize_when_critic_reads_images_expected_error(models: Path) -> None:
    with pytest.raises(BadInputError, match=r"scalar head on a vision-language model \('qwen3_vl'\)"):
        cases.make_engine(models / "qwen3_vl", role="critic")


def test_forward_when_text_model_gets_images_expected_error_naming_the_model(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path))

    with pytest.raises(BadInputError, match="'qwen2' reads text only"):
        engine.forward(vision.make_batch())


def test_forward_when_placeholders_are_missing_expected_error_with_both_numbers(models: Path) -> None:
    batch = vision.make_batch().select([5])
    batch.multi_modal_input = [vision.make_images([(4, 6)], 0)]
    engine = cases.make_engine(models / "qwen2_5_vl")

    with pytest.raises(BadInputError, match=r"has 6 features, but input_ids has only 2 tokens 55"):
        engine.forward(batch)


def test_forward_when_tensor_has_another_name_expected_error_naming_it(models: Path) -> None:
    batch = vision.make_batch().select([5])
    batch.multi_modal_input = [{"image_pixels": torch.zeros(1)}]
    engine = cases.make_engine(models / "qwen2_5_vl")

    with pytest.raises(BadInputError, match="has no argument 'image_pixels'"):
        engine.forward(batch)


@pytest.mark.parametrize("backend", ["fsdp:t2", "fsdp:c2"])
def test_check_parallel_when_images_and_tokens_are_split_expected_error(backend: str, models: Path) -> None:
    from areal_core.api.configs import TrainEngineConfig
    from areal_fsdp.mesh import Mesh
    from areal_fsdp.parallel import check_parallel

    model = transformers.AutoModelForImageTextToText.from_pretrained(models / "qwen3_vl")
    mesh = Mesh(device=torch.device("cpu"), **({"tp_size": 2} if "t" in backend[4:] else {"cp_size": 2}))

    with pytest.raises(BadInputError, match=r"actor\.backend: model type 'qwen3_vl' reads images"):
        check_parallel(model, mesh, TrainEngineConfig(path="x", backend=backend), FSDPConfig())
