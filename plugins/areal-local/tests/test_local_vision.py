"""Requests with images: greedy output against transformers.generate, log-probs against a plain forward."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.errors import BadInputError
from areal_local.engine import LocalEngine

VOCAB, IMAGE, VIDEO, START, END = 97, 90, 91, 92, 93
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.5,
}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def build_model(kind: str) -> Any:
    if kind == "qwen2_5_vl":
        vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **_IDS)
    else:
        vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config={**_TEXT, "head_dim": 8}, vision_config=vision, **_IDS)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 4096}
    return SimpleNamespace(image_processor=Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size))


def make_image(height: int, width: int, seed: int) -> np.ndarray[Any, Any]:
    """Random pixels; a multiple of 8 pixels is not resized and gives height * width / 64 features."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_prompt(images: list[np.ndarray[Any, Any]], seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 80, 4).tolist()
    for image in images:
        count = image.shape[0] * image.shape[1] // 64
        ids += [START, *[IMAGE] * count, END, *rng.integers(0, 80, 2).tolist()]
    return ids


def model_inputs(processor: Any, prompt: list[int], images: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([prompt])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        inputs |= dict(processor.image_processor(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return inputs


def ask(engine: LocalEngine, processor: Any, jobs: list[tuple[list[int], list[Any], int]]) -> list[ModelResponse]:
    """Greedy answers to (prompt, images, tokens)."""

    async def main() -> list[ModelResponse]:
        requests = [
            ModelRequest(
                input_ids=prompt,
                gconfig=GenerationHyperparameters(greedy=True, max_new_tokens=count),
                image_data=images,
                processor=processor,
            )
            for prompt, images, count in jobs
        ]
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_greedy_when_prompts_have_images_equals_transformers_generate(
    kind: str, make_engine: Any, processor: Any
) -> None:
    model = build_model(kind)
    one, other, wide = make_image(16, 24, 1), make_image(16, 24, 2), make_image(8, 32, 3)
    prompt = make_prompt([one], 5)
    jobs = [
        (make_prompt([one, wide], 4), [one, wide], 9),
        (prompt, [one], 12),
        (prompt, [one], 12),  # the same again
        (prompt, [other], 12),  # the same text with another image
        (make_prompt([], 6), [], 14),
    ]
    # Fewer rows than requests: rows are freed, moved and used again.
    engine = make_engine(model, max_batch_size=3)

    answers = ask(engine, processor, jobs)

    assert answers[1].output_tokens != answers[3].output_tokens
    assert len({token for answer in answers for token in answer.output_tokens}) > 10
    for (ids, images, count), answer in zip(jobs, answers, strict=True):
        inputs = model_inputs(processor, ids, images)
        with torch.no_grad():
            model.model.rope_deltas = None
            whole = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)[0]
            assert answer.output_tokens == whole[len(ids) :].tolist()
            model.model.rope_deltas = None
            inputs = model_inputs(processor, whole.tolist(), images)
            if images:
                inputs["mm_token_type_ids"][:, len(ids) :] = 0
            logp = torch.log_softmax(model(**inputs).logits[0].double(), -1)
        expected = logp[:-1].gather(-1, whole[1:, None])[len(ids) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(answer.output_logprobs).double(), expected, rtol=0, atol=1e-5)


def test_weights_when_updated_during_generation_expected_images_are_read_again(
    make_engine: Any, processor: Any
) -> None:
    model, image = build_model("qwen2_5_vl"), make_image(16, 24, 1)
    prompt = make_prompt([image], 5)
    engine = make_engine(model)
    alone = ask(engine, processor, [(prompt, [image], 40)])[0]
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    async def main() -> ModelResponse:
        request = ModelRequest(
            input_ids=prompt,
            gconfig=GenerationHyperparameters(greedy=True, max_new_tokens=40),
            image_data=[image],
            processor=processor,
        )
        task = asyncio.ensure_future(engine.agenerate(request))
        while not engine._loop.rows.running and not task.done():
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.update_weights_from_memory, weights.items(), 1)
        return await task

    answer = asyncio.run(main())

    # The same weights under another version: the sequence so far is computed again, with its image.
    assert answer.output_tokens == alone.output_tokens
    assert engine.get_version() == 1


def test_request_when_model_reads_text_only_expected_error(make_engine: Any, make_model: Any, processor: Any) -> None:
    image = make_image(16, 24, 1)
    engine = make_engine(make_model("qwen3"))

    with pytest.raises(BadInputError, match="image_data: model type 'qwen3' reads text only"):
        ask(engine, processor, [(make_prompt([image], 5), [image], 2)])


def test_request_when_placeholders_are_missing_expected_error(make_engine: Any, processor: Any) -> None:
    image = make_image(16, 24, 1)
    engine = make_engine(build_model("qwen3_vl"))

    with pytest.raises(BadInputError, match="has 6 features, but input_ids has only 0 tokens 90"):
        ask(engine, processor, [(make_prompt([], 5), [image], 2)])


@pytest.mark.parametrize(("given", "message"), [(False, "needs request.processor"), (True, "cannot read it")])
def test_request_when_image_cannot_be_read_expected_error(
    given: bool, message: str, make_engine: Any, processor: Any
) -> None:
    engine = make_engine(build_model("qwen3_vl"))

    with pytest.raises(BadInputError, match=message):
        ask(engine, processor if given else None, [([1, 2, 3], ["no image"], 2)])
