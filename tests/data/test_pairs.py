"""Preference pairs: the forms of rows, what is trained, and that no pair is ever split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_arithmetic.model import train_tokenizer
from areal_core.data.microbatch import split_by_tokens
from areal_core.data.pairs import encode_pair, pack_pairs, partition_pairs
from areal_core.errors import BadInputError

QUESTION = {"role": "user", "content": "2 apples and 3 more?"}
GOOD, BAD = {"role": "assistant", "content": "2+3=5"}, {"role": "assistant", "content": "2+3=7\n#### 7"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


ROWS: dict[str, dict[str, Any]] = {
    "chats": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "text prompt, text answers": {"prompt": QUESTION["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "chat prompt, text answers": {"messages": [QUESTION], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "chat prompt, message answers": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "text prompt, whole chats": {
        "prompt": QUESTION["content"],
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    },
}


@pytest.mark.parametrize("form", ROWS)
def test_encode_pair_when_forms_differ_gives_the_same_tokens(form: str, tokenizer: Any) -> None:
    # Act
    pair = encode_pair(ROWS[form], tokenizer, target="answer")

    # Assert: the prompt as it is rendered, and the answer with its end-of-turn token.
    assert pair is not None
    for side, message in (("chosen", GOOD), ("rejected", BAD)):
        ids, mask = pair[side]["input_ids"], pair[side]["loss_mask"]
        assert tokenizer.decode(ids[mask]) == message["content"] + "<|im_end|>"
        assert tokenizer.decode(ids[~mask]) == tokenizer.apply_chat_template(
            [QUESTION], tokenize=False, add_generation_prompt=True
        )


def test_encode_pair_when_for_a_score_marks_one_token_after_the_end(tokenizer: Any) -> None:
    pair = encode_pair(ROWS["chats"], tokenizer, target="score")
    assert pair is not None
    for side in ("chosen", "rejected"):
        ids, mask = pair[side]["input_ids"], pair[side]["loss_mask"]
        assert np.flatnonzero(mask).tolist() == [len(ids) - 1]
        assert ids[-1] == ids[-2] == tokenizer.eos_token_id


def test_encode_pair_when_turns_are_shared_trains_on_the_last_only(tokenizer: Any) -> None:
    # Arrange
    start = [QUESTION, GOOD, {"role": "user", "content": "and 1 more?"}]
    answers = {"chosen": "5+1=6", "rejected": "5+1=8"}

    # Act
    pair = encode_pair(
        {s: [*start, {"role": "assistant", "content": a}] for s, a in answers.items()}, tokenizer, target="answer"
    )

    # Assert
    assert pair is not None
    for side, answer in answers.items():
        assert tokenizer.decode(pair[side]["input_ids"][pair[side]["loss_mask"]]) == answer + "<|im_end|>"


def test_encode_pair_when_too_long_or_equal_is_left_out(tokenizer: Any) -> None:
    length = max(
        len(encode_pair(ROWS["chats"], tokenizer, target="answer")[s]["input_ids"]) for s in ("chosen", "rejected")
    )  # type: ignore[index]
    assert encode_pair(ROWS["chats"], tokenizer, length, target="score") is not None
    assert encode_pair(ROWS["chats"], tokenizer, length - 1, target="score") is None
    assert encode_pair({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]}, tokenizer, target="answer") is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [QUESTION, GOOD]}, r"row 4 .*columns \['chosen'\], but no `rejected`"),
        ({"chosen": "a", "rejected": "b"}, r"row 4 .*`chosen` is text, so the row needs its `prompt`"),
        ({"chosen": [QUESTION], "rejected": [QUESTION, BAD]}, r"row 4 .*`chosen` ends with role 'user'"),
        ({"chosen": [QUESTION, GOOD], "rejected": 3}, r"row 4 .*`rejected` must be text or a list .*it is a int"),
        ({"chosen": [], "rejected": [QUESTION, BAD]}, r"row 4 .*`chosen` must be .*it is an empty list"),
        ({"prompt": [QUESTION, GOOD], "chosen": "a", "rejected": "b"}, r"row 4 .*`prompt` ends with the assistant"),
        (
            {"prompt": "other", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
            r"row 4 .*`chosen` is a chat of its own that does not begin with `prompt`",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"},
            r"row 4 .*`margin` must be a finite number, got 'big'",
        ),
    ],
)
def test_encode_pair_when_row_is_bad_names_row_and_column(row: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(BadInputError, match=message):
        encode_pair({**row, "_index": 4}, tokenizer, target="answer")


def test_encode_pair_when_the_row_has_tools_expected_them_in_both_prompts() -> None:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}" + tokenizer.chat_template

    pair = encode_pair({**ROWS["chats"], "tools": [{"name": "adder"}]}, tokenizer, target="answer")

    assert pair is not None
    assert all(tokenizer.decode(pair[side]["input_ids"]).startswith("adder") for side in ("chosen", "rejected"))


def test_pack_pairs_expected_sides_alternate_with_their_shared_prompt(tokenizer: Any) -> None:
    # Arrange
    rows = [ROWS["chats"], {"prompt": "1?", "chosen": "1", "rejected": "2", "margin": -0.5}]
    pairs = [encode_pair(row, tokenizer, target="answer") for row in rows]

    # Act
    batch = pack_pairs([pair for pair in pairs if pair is not None])

    # Assert
    sequences = list(batch.sequences("input_ids"))
    for index, pair in enumerate(pairs):
        assert pair is not None
        assert sequences[2 * index].tolist() == pair["chosen"]["input_ids"].tolist()
        assert sequences[2 * index + 1].tolist() == pair["rejected"]["input_ids"].tolist()
    assert batch["pair_ids"].tolist() == batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch["margins"].tolist() == [0.0, 0.0, -0.5, -0.5]
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False)
    assert batch["prompt_lens"].tolist()[:2] == [len(prompt), len(prompt)]


def test_pack_pairs_when_one_side_is_trained_earlier_expected_a_prompt_without_trained_tokens() -> None:
    # Arrange: both begin with 1 2 3; the chosen answer begins at the third token, the rejected one after it.
    sides = {"chosen": ([1, 2, 3, 4], [0, 0, 1, 1]), "rejected": ([1, 2, 3, 5], [0, 0, 0, 1])}
    pair = {k: {"input_ids": np.array(ids), "loss_mask": np.array(m, bool)} for k, (ids, m) in sides.items()}

    # Act
    batch = pack_pairs([{"margin": 0.0, **pair}])

    # Assert
    assert batch["prompt_lens"].tolist() == [2, 2]


def test_encode_pair_when_one_chat_begins_with_the_whole_other_trains_on_every_answer_that_is_left(
    tokenizer: Any,
) -> None:
    # Arrange
    longer = [QUESTION, GOOD, QUESTION, BAD]

    # Act
    pair = encode_pair({"chosen": [QUESTION, GOOD], "rejected": longer}, tokenizer, target="answer")

    # Assert: the chosen chat's only answer is its own, so it is not shared.
    assert pair is not None
    learned = {
        side: tokenizer.decode(pair[side]["input_ids"][pair[side]["loss_mask"]]) for side in pair if side != "margin"
    }
    end = tokenizer.eos_token
    assert learned == {"chosen": GOOD["content"] + end, "rejected": GOOD["content"] + end + BAD["content"] + end}


def test_partition_pairs_when_one_pair_is_long_expected_attention_cost_gives_its_part_fewer_tokens() -> None:
    # Arrange: one pair of 16000 tokens, and 32 of 1000.
    lengths = [8000, *[500] * 32]
    one = {n: {"input_ids": np.zeros(n, np.int64), "loss_mask": np.ones(n, bool)} for n in set(lengths)}
    batch = pack_pairs([{"margin": 0.0, "chosen": one[n], "rejected": one[n]} for n in lengths])

    # Act
    by_tokens, by_cost = (partition_pairs(batch, 2, attention_cost=cost) for cost in (0.0, 1 / (12 * 1024)))

    # Assert: 8000 tokens cost 1.65 times their number, 500 tokens 1.04 times.
    def tokens(parts: list[list[int]]) -> list[int]:
        return sorted(sum(2 * lengths[i // 2] for i in part[::2]) for part in parts)

    assert tokens(by_tokens) == [24000, 24000]
    assert tokens(by_cost) == [19000, 29000]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=0, max_size=12), k=st.integers(1, 5), budget=st.integers(1, 80))
def test_pairs_when_partitioned_and_split_stay_whole(lengths: list[int], k: int, budget: int) -> None:
    # Arrange
    pairs = [
        {
            "margin": 0.0,
            **{
                side: {"input_ids": np.arange(n + extra), "loss_mask": np.ones(n + extra, bool)}
                for side, extra in (("chosen", 0), ("rejected", 3))
            },
        }
        for n in lengths
    ]
    batch = pack_pairs(pairs)

    # Act
    parts = partition_pairs(batch, k, attention_cost=0.01)

    # Assert: every sequence once; the chosen side, then the rejected one, in every part and micro-batch.
    assert len(parts) == k
    assert all(part[::2] == [i - 1 for i in part[1::2]] and all(i % 2 == 0 for i in part[::2]) for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(2 * len(lengths)))
    for part in parts:
        shard = batch.select(part)
        for micro in split_by_tokens(
            shard.seqlens.tolist(), budget, groups=shard["pair_ids"].tolist(), whole_groups=True
        ):
            ids = shard["pair_ids"][torch.tensor(micro, dtype=torch.int64)]
            assert torch.equal(ids[::2], ids[1::2]) and len(ids) % 2 == 0
