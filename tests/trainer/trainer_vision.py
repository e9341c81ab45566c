"""A toy task for a vision-language model: name the colour of a square. Model, processor, dataset and reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
_SPECIAL = ["<pad>", "<user>", "<bot>", "<end>", "<vision>", "</vision>", "<image>", "<video>"]
_WORDS = [*_SPECIAL, *COLOURS, "what", "colour", "is", "this", "?", "hello", "<unk>"]
IMAGE = _WORDS.index("<image>")
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<vision> <image> </vision> {% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %} <end> {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def square(colour: str, side: int = 16) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.array(COLOURS[colour], np.uint8), (side, side, 3))


def write_model_folder(folder: Path) -> Path:
    """A random Qwen2.5-VL of two layers, with its processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=_SPECIAL[4:],
        chat_template=TEMPLATE,
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096}, do_resize=True
    )
    images.save_pretrained(folder)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(_WORDS),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": None,
            "eos_token_id": _WORDS.index("<end>"),
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
            "initializer_range": 0.3,
        },
        image_token_id=IMAGE,
        video_token_id=_WORDS.index("<video>"),
        vision_start_token_id=_WORDS.index("<vision>"),
        vision_end_token_id=_WORDS.index("</vision>"),
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def colours_dataset(path: Any, split: str, *, kind: str, tokenizer: Any, max_length: Any) -> list[dict[str, Any]]:
    """Squares of two sizes in the three colours; one row has two images, and one none."""
    ask = {"type": "text", "text": "what colour is this ?"}
    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": [{"type": "image", "image": square(colour, side)}, ask]}],
            "answer": colour,
        }
        for colour in COLOURS
        for side in (16, 24)
    ]
    rows.append(
        {
            "messages": [{"role": "user", "content": "what colour is this ?"}],
            "images": [square("red"), square("blue")],
            "answer": "blue",
        }
    )
    rows.append({"messages": [{"role": "user", "content": "hello"}], "answer": "red"})
    return rows


def colour_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], *, answer: str, **data: Any
) -> float:
    """The share of words that are the answer, and a little for each other token, so that samples differ."""
    assert "images" not in data and all("image" not in part for part in _parts(data["messages"]))
    words = completions.split()
    return words.count(answer) / max(1, len(words)) + 0.01 * (sum(completion_ids) % 7)


def _parts(messages: list[dict[str, Any]]) -> list[Any]:
    return [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
