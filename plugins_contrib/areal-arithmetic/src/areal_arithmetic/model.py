"""A model folder without weights: a tokenizer that knows the problems' words, and the shape of a tiny Qwen3."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from areal_arithmetic.config import KINDS
from areal_arithmetic.problems import make_problem
from areal_core import BadInputError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
_CORPUS_SIZE = 2000
_CORPUS_MAX_NUMBER = 99
_MOST_ENTRIES = 512
_CONTEXT = 256


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits and the ChatML template; takes about a second."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MOST_ENTRIES,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(0)
    problems = (make_problem(rng, _CORPUS_MAX_NUMBER, KINDS) for _ in range(_CORPUS_SIZE))
    tokenizer.train_from_iterator((f"user\n{p.question} assistant\n{p.solution}\n" for p in problems), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model_folder(
    folder: Path, *, hidden: int = 128, layers: int = 2, heads: int = 4, overwrite: bool = False
) -> list[str]:
    """Write the tokenizer and ``config.json`` of a Qwen3 model without weights.

    The same arguments write the same bytes, so a second call changes nothing.

    Args:
        folder: made if missing; files in it that have other names stay.
        hidden: width; the MLP is three times as wide.
        layers: number of layers.
        heads: attention heads; there are half as many KV heads.
        overwrite: replace files that differ instead of raising.

    Returns:
        The names of the files that were written; empty if all were there.

    Raises:
        BadInputError: for a shape that is no model, a folder that cannot be written, or one that holds another model.
    """
    kv_heads = max(1, heads // 2)
    if hidden % (2 * heads) != 0:
        raise BadInputError(
            f"--hidden {hidden} must be a multiple of twice --heads {heads}: a head's size must be even, for RoPE"
        )
    if heads % kv_heads != 0:
        raise BadInputError(f"--heads must be 1 or even, got {heads}")
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=_CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".init-") as scratch:
            tokenizer.save_pretrained(scratch)
            config.save_pretrained(scratch)
            return _move_changed(Path(scratch), folder, overwrite=overwrite)
    except OSError as error:
        raise BadInputError(f"cannot write the model folder {folder}: {error}") from error


def _move_changed(source: Path, folder: Path, *, overwrite: bool) -> list[str]:
    changed = []
    for file in sorted(source.iterdir()):
        target = folder / file.name
        if target.exists():
            if target.read_bytes() == file.read_bytes():
                continue
            if not overwrite:
                raise BadInputError(f"{target} belongs to another model. Choose another folder, or add --overwrite.")
        changed.append(file)
    for file in changed:
        os.replace(file, folder / file.name)
    return [file.name for file in changed]
