"""Conversations as tokens and loss masks, on small tokenizers made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core.data.sft import encode_example
from areal_core.errors import BadInputError

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '</s>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
# Drops what the assistant said in earlier turns, as templates of reasoning models drop earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
# The prompt for a new answer is not how an old one begins.
THINKING = CHATML.replace("{{ '<s>assistant\n' }}", "{{ '<s>assistant\n<think>' }}")
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4!"},
]


def make_tokenizer(chat_template: str | None, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges or []])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = chat_template
    return tokenizer


def learned_text(example: dict[str, Any] | None, tokenizer: Any) -> list[str]:
    """The learned spans, decoded."""
    assert example is not None
    spans: list[list[int]] = []
    previous = False
    for token, learned in zip(example["input_ids"].tolist(), example["loss_mask"].tolist(), strict=True):
        if learned:
            if not previous:
                spans.append([])
            spans[-1].append(token)
        previous = learned
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING], ids=["prefix", "marked", "thinking"])
def test_encode_when_several_turns_expected_all_answers_with_end_token(template: str) -> None:
    tokenizer = make_tokenizer(template)

    example = encode_example({"messages": CHAT, "answer": "4"}, tokenizer)

    assert learned_text(example, tokenizer) == ["2.</s>", "4!</s>"]
    assert example is not None
    assert example["input_ids"].dtype == np.int64
    assert example["loss_mask"].dtype == np.bool_
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert example["input_ids"].tolist() == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefix", "marked"])
def test_encode_when_the_row_has_tools_expected_them_in_the_prompt(template: str) -> None:
    tokenizer = make_tokenizer("{% for tool in tools or [] %}{{ '<tool>' + tool['name'] }}{% endfor %}" + template)

    example = encode_example({"messages": CHAT, "tools": [{"name": "adder"}]}, tokenizer)

    assert learned_text(example, tokenizer) == ["2.</s>", "4!</s>"]
    assert example is not None
    assert tokenizer.decode(example["input_ids"]).startswith("<tool>adder<s>user")


def test_encode_when_an_answer_holds_the_end_token_expected_it_whole() -> None:
    tokenizer = make_tokenizer(CHATML)

    example = encode_example({"messages": [CHAT[0], {"role": "assistant", "content": "a</s>b"}]}, tokenizer)

    assert learned_text(example, tokenizer) == ["a</s>b</s>"]


def test_encode_when_prompt_and_answer_share_a_token_expected_apart() -> None:
    # "\n2" would be one token of the whole text, but a model that generates the answer never sees it.
    tokenizer = make_tokenizer(CHATML, merges=[("Ċ", "2")])
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)

    example = encode_example({"messages": CHAT[:2]}, tokenizer)

    assert example is not None
    assert example["input_ids"].tolist()[: len(prompt)] == prompt
    assert learned_text(example, tokenizer) == ["2.</s>"]


def test_encode_when_template_rewrites_earlier_turns_expected_last_answer_only() -> None:
    tokenizer = make_tokenizer(FORGETFUL)

    example = encode_example({"messages": CHAT}, tokenizer)

    assert learned_text(example, tokenizer) == ["4!</s>"]


def test_encode_when_train_on_prompt_expected_all_but_first_token() -> None:
    example = encode_example({"messages": CHAT}, make_tokenizer(CHATML), train_on_prompt=True)

    assert example is not None
    assert example["loss_mask"].tolist() == [False] + [True] * (len(example["input_ids"]) - 1)


def test_encode_when_longer_than_max_length_expected_none() -> None:
    tokenizer = make_tokenizer(CHATML)
    example = encode_example({"messages": CHAT}, tokenizer)
    assert example is not None
    length = len(example["input_ids"])

    assert encode_example({"messages": CHAT}, tokenizer, max_length=length) is not None
    assert encode_example({"messages": CHAT}, tokenizer, max_length=length - 1) is None


def test_encode_when_tokens_are_given_expected_passed_through() -> None:
    row = {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]}

    example = encode_example(row, tokenizer=None)

    assert example is not None
    assert example["input_ids"].tolist() == [5, 6, 7]
    assert example["loss_mask"].tolist() == [False, False, True]
    assert row["loss_mask"] == [1, 0, 1]


def test_encode_when_nothing_is_learned_expected_none() -> None:
    assert encode_example({"input_ids": [5, 6], "loss_mask": [1, 0]}, tokenizer=None) is None
    assert encode_example({"input_ids": [], "loss_mask": []}, tokenizer=None) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b", "_index": 3}, r"row 3 .*columns \['prompt', 'answer'\].*`messages`"),
        ({"input_ids": [1, 2]}, r"\['input_ids'\]: input_ids needs a loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"shape \(2,\) and loss_mask \(1,\)"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "must be lists of numbers"),
        ({"messages": "hello"}, "list of dicts with `role` and `content`"),
        ({"messages": [{"content": "x"}]}, "list of dicts with `role` and `content`"),
        ({"messages": CHAT[:1]}, r"roles \['user'\], but no assistant"),
        ({"messages": []}, "no assistant"),
    ],
)
def test_encode_when_row_is_unusable_expected_error_that_says_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        encode_example(row, make_tokenizer(CHATML))


def test_encode_when_tokenizer_has_no_chat_template_expected_error() -> None:
    with pytest.raises(BadInputError, match=r"no chat template.*instruction-tuned"):
        encode_example({"messages": CHAT}, make_tokenizer(None))


def test_encode_when_template_rejects_roles_expected_error() -> None:
    template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(BadInputError, match="rejects `messages`: roles must alternate"):
        encode_example({"messages": CHAT}, make_tokenizer(template))


def test_encode_when_last_answer_cannot_be_found_expected_error() -> None:
    # The answer comes first in the rendered text, so no prompt is a prefix.
    template = "{{ messages[-1]['content'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"

    with pytest.raises(BadInputError, match="cannot be told from the prompt"):
        encode_example({"messages": CHAT[:2]}, make_tokenizer(template))
