"""A byte-level tokenizer of a few hundred tokens, with the chat templates that tests need."""

from __future__ import annotations

from collections.abc import Sequence

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
# ChatML with tools as Hermes and Qwen have them.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call a tool with <tool_call>JSON</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>{{ m['content'] }}"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that, as Mistral's, takes a tool's answer only after a call.
STRICT_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if not messages[loop.index0 - 1]['tool_calls'] %}{{ raise_exception('no call before') }}{% endif %}"
    "[RESULT]{{ m['content'] }}[/RESULT]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}[CALL]{{ call['function']['arguments'] | tojson }}[/CALL]{% endfor %}"
    "<|im_end|>{% else %}[{{ m['role'] }}]{{ m['content'] }}[/{{ m['role'] }}]{% endif %}{% endfor %}"
    "{# <tool_call> tools #}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2}
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|begin|>", "<|header|>", "<|end_header|>", "<|pad|>"]


def tiny_tokenizer(template: str | None = CHATML, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """With ``merges``, text has several encodings: the tokens of a merge, and the merged one."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
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
