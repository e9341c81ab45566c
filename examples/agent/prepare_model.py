"""Write a tiny model folder for the calculator agent: tokenizer, chat template with tools, config.json; no weights.

python examples/agent/prepare_model.py runs/agent/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from calculator_agent import get_demonstrations
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from areal_arithmetic.model import END_OF_TEXT, TURN_END, TURN_START

CONTEXT = 256
# A model from nothing has to be told only which tools there are.
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\ntools:' -}}"
    "{%- for tool in tools -%}{{- ' ' + tool['function']['name'] -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}{%- generation -%}{{- message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    """{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}"""
    "{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rows = get_demonstrations(None, "train", kind="sft")
    tokenizer.train_from_iterator((_plain(message) for row in rows for message in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, padding_side="left"
    )
    fast.add_tokens(["<tool_call>", "</tool_call>"])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _plain(message: dict) -> str:
    calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
    return f"{message['role']}\n{message['content']}{calls}\n tools: calculate\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


if __name__ == "__main__":
    main()
