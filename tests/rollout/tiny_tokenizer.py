"""A byte-level tokenizer of a few hundred tokens, with the chat templates that tests need."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|end_header|>\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|end_header|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|begin|>[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2}
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|begin|>", "<|header|>", "<|end_header|>", "<|pad|>"]


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|begin|>", "<|header|>", "<|end_header|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
