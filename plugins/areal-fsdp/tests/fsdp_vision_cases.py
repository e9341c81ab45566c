"""Tiny vision-language models and batches with 0, 1 and 2 images; also imported by worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import torch
import transformers

from areal_core.api.batch import PackedBatch, TokenOutput

IMAGE, VIDEO, START, END = 55, 56, 57, 58
ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TEXT: dict[str, Any] = {
    "vocab_size": cases.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.4,
}
#: Of a flattened patch: channels x frames x height x width.
PATCH = 3 * 2 * 4 * 4
#: Of gemma3's images, in pixels.
SIDE = 16


def model_config(arch: str) -> Any:
    if arch == "qwen2_5_vl":
        vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **_IDS)
    if arch == "qwen2_vl":
        # Of its tower hidden_size is the width of the text that follows.
        names = ("depth", "num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size", "initializer_range")
        vision = {**{name: _VISION[name] for name in names}, "embed_dim": 16, "mlp_ratio": 2, "hidden_size": 32}
        return transformers.Qwen2VLConfig(text_config=_TEXT, vision_config=vision, **_IDS)
    if arch == "gemma3":
        vision = {
            **{name: _VISION[name] for name in ("hidden_size", "intermediate_size", "patch_size")},
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
        }
        text = {name: value for name, value in _TEXT.items() if name != "rope_parameters"}
        return transformers.Gemma3Config(
            text_config={**text, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
            initializer_range=0.2,
        )
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config={**_TEXT, "head_dim": 8}, vision_config=vision, **_IDS)


def make_folder(arch: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(model_config(arch), dtype=torch.float32)
    if arch == "gemma3":  # It starts with a projection of zeros, and would not see its images.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(folder)
    return folder


def make_images(grids: list[tuple[int, int]], seed: int, arch: str = "qwen3_vl") -> dict[str, torch.Tensor]:
    """Images of ``height x width`` patches, as an image processor gives them; those of gemma3 are all of one size."""
    if not grids:
        return {}
    generator = torch.Generator().manual_seed(seed)
    if arch == "gemma3":
        return {"pixel_values": torch.randn(len(grids), 3, SIDE, SIDE, generator=generator)}
    grid = torch.tensor([(1, height, width) for height, width in grids])
    pixels = torch.randn(int(grid.prod(-1).sum()), PATCH, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": grid}


def make_batch(seed: int = 0, arch: str = "qwen3_vl") -> PackedBatch:
    """Five prompts with 2, 0, 1, 0 and 1 images, and 3, 2, 1, 1 and 1 completions.

    Two completions hold a placeholder, as if it had been sampled (but for gemma3).
    """
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=generator).tolist()

    ids, masks, groups, prompts, images = [], [], [], [], []
    shapes: list[tuple[list[tuple[int, int]], list[int]]] = [
        ([(4, 2), (4, 6)], [5, 2, 9]),
        ([], [4, 7]),
        ([(2, 4)], [6]),
        ([], [3]),
        ([(6, 6)], [8]),
    ]
    for group, (grids, completions) in enumerate(shapes):
        prompt = text(3)
        for height, width in grids:
            count = 4 if arch == "gemma3" else height * width // 4
            prompt += [START, *[IMAGE] * count, END, *text(2)]
        shared = make_images(grids, seed + group, arch)
        for length in completions:
            completion = text(length)
            if length in (7, 9) and arch != "gemma3":
                completion[3] = IMAGE
            ids.append(torch.tensor([*prompt, *completion]))
            masks.append(torch.tensor([False] * len(prompt) + [True] * length))
            groups.append(group)
            prompts.append(len(prompt))
            images.append(shared)
    total = sum(map(len, ids))
    return PackedBatch(
        torch.tensor([0, *map(len, ids)]).cumsum(0).int(),
        {
            "input_ids": torch.cat(ids),
            "loss_mask": torch.cat(masks),
            "advantages": torch.randn(total, generator=generator),
        },
        {"group_ids": torch.tensor(groups), "prompt_lens": torch.tensor(prompts).int()},
        images,
    )


def reference_logprobs(model: Any, batch: PackedBatch) -> torch.Tensor:
    """``[T]`` by transformers' own forward, one sequence at a time.

    A placeholder that was sampled is fed as its embedding, as ``generate`` feeds it.
    """
    logprobs = []
    assert batch.multi_modal_input is not None
    for index, ids in enumerate(batch.sequences("input_ids")):
        prompt, images = int(batch["prompt_lens"][index]), batch.multi_modal_input[index]
        types = (ids == IMAGE).long()
        types[prompt:] = 0
        whole = ids.clone()
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args, whole=whole: (whole[None],))
        seen = torch.where((ids == IMAGE) & (types == 0), 3, ids)
        extra = {"mm_token_type_ids": types[None], **images} if images else {}
        if model.config.model_type == "gemma3":
            extra["token_type_ids"] = extra.pop("mm_token_type_ids", types[None])
        model.model.rope_deltas = None
        logits = model(input_ids=seen[None], use_cache=False, **extra).logits[0]
        hook.remove()
        logp = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
        mask = torch.arange(1, len(ids)) >= prompt
        logprobs.append(torch.cat([logp.new_zeros(1), logp * mask]))
    return torch.cat(logprobs)


def reference_step(folder: Path, batch: PackedBatch) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, log-probs and gradients in fp64 by plain autograd over single sequences."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    logprobs = reference_logprobs(model, batch)
    loss = cases.policy_loss(TokenOutput(logprobs), batch).loss / cases.token_weight(batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), logprobs.detach(), gradients
