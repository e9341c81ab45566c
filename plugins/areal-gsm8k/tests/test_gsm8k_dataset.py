from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core import BadInputError
from areal_gsm8k.dataset import get_gsm8k_dataset

ROWS = [
    {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "What is 4 * 5, and why does it matter to the farmer?", "answer": "4 * 5 = <<4*5=20>>20\n#### 20"},
]


@pytest.fixture(scope="module")
def tokenizer():
    fast = PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer(), unk_token="[UNK]")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


def _word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, split="train", kind="rl", **arguments):
    return get_gsm8k_dataset(str(path), split, kind=kind, **arguments)


def test_rl_rows_when_loaded_hold_question_and_reference(tmp_path):
    dataset = load(write_jsonl(tmp_path / "any.jsonl", ROWS))

    assert dataset.column_names == ["messages", "answer"]
    assert list(dataset) == [
        {"messages": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS
    ]


def test_sft_rows_when_loaded_end_with_the_solution(tmp_path):
    path = write_jsonl(tmp_path / "any.jsonl", ROWS)

    raw = load(path, kind="sft")[0]["messages"]
    stripped = load(path, kind="sft", strip_calculator=True)[0]["messages"]

    assert [m["role"] for m in raw] == ["user", "assistant"]
    assert raw[1]["content"] == "2 + 3 = <<2+3=5>>5\n#### 5"
    assert stripped[1]["content"] == "2 + 3 = 5\n#### 5"


def test_instruction_when_set_follows_each_question(tmp_path):
    dataset = load(write_jsonl(tmp_path / "any.jsonl", ROWS), instruction="End with ####.")

    assert dataset[0]["messages"][0]["content"] == "What is 2 + 3?\nEnd with ####."


@pytest.mark.parametrize(
    "layout", ["{split}.jsonl", "main/{split}.jsonl", "{split}.parquet", "main/{split}-0-of-1.parquet"]
)
def test_folder_when_it_has_a_known_layout_gives_the_split(tmp_path, layout):
    # Arrange
    for split, rows in (("train", ROWS[:1]), ("test", ROWS[1:])):
        file = tmp_path / layout.format(split=split)
        if file.suffix == ".jsonl":
            write_jsonl(file, rows)
        else:
            file.parent.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), file)

    # Act
    train, test = load(tmp_path, "train"), load(tmp_path, "test")

    # Assert
    assert train["answer"] == [ROWS[0]["answer"]]
    assert test["answer"] == [ROWS[1]["answer"]]


def test_parquet_when_in_several_files_is_read_in_order(tmp_path):
    for number, row in enumerate(ROWS):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"train-0000{number}-of-00002.parquet")

    assert load(tmp_path)["answer"] == [row["answer"] for row in ROWS]


# "user" + question + "assistant", and for sft the solution's words
@pytest.mark.parametrize(("kind", "lengths"), [("rl", (7, 15)), ("sft", (14, 22))])
def test_max_length_when_set_counts_chat_template_tokens(tmp_path, tokenizer, kind, lengths):
    path = write_jsonl(tmp_path / "any.jsonl", ROWS)

    def kept(max_length: int) -> int:
        return len(load(path, kind=kind, tokenizer=tokenizer, max_length=max_length))

    assert [kept(lengths[0]), kept(lengths[1] - 1), kept(lengths[1])] == [1, 1, 2]
    with pytest.raises(BadInputError, match=rf"max_length={lengths[0] - 1} tokens \(the shortest has {lengths[0]}\)"):
        kept(lengths[0] - 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"problem": "x", "answer": "y"}\n',
            "has no column 'question'. It needs the columns 'question' and 'answer'; it has 'problem', 'answer'",
        ),
        ('{"problem": "x"}\n', "has no column 'question' or 'answer'"),
        ("", "has no rows"),
        ("not json\n", "cannot be read as jsonl"),
        (
            '{"question": "x", "answer": "y"}\n{"question": "x"}\n',
            "row 2: question and answer must be text, got 'x' and None",
        ),
        ('{"question": "x", "answer": 5}\n', "row 1: question and answer must be text"),
    ],
)
def test_file_when_content_is_bad_raises_with_its_name(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)

    with pytest.raises(BadInputError, match=re.escape(message)) as caught:
        load(file)

    assert str(file) in str(caught.value)


def test_parquet_when_damaged_raises_with_its_name(tmp_path):
    file = tmp_path / "train.parquet"
    file.write_bytes(b"PAR1 this is not parquet")

    with pytest.raises(BadInputError, match=r"train\.parquet cannot be read as parquet"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "missing.jsonl", "~/missing-folder"])
def test_path_when_missing_raises(name):
    with pytest.raises(BadInputError, match=f"no such file or folder: {re.escape(name)}"):
        load(name)


def test_folder_when_split_is_missing_names_what_is_there(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ROWS)

    with pytest.raises(BadInputError, match=r"holds no split 'train'.*It holds test\.jsonl"):
        load(tmp_path, "train")


def test_file_when_of_another_type_raises(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("question,answer\n")

    with pytest.raises(BadInputError, match=r"neither a \.jsonl nor a \.parquet"):
        load(file)


def test_kind_when_unknown_raises(tmp_path):
    with pytest.raises(BadInputError, match="rl and sft, not 'dpo'"):
        load(tmp_path, kind="dpo")


@pytest.mark.parametrize("template", [None, "no tokenizer"])
def test_max_length_when_tokenizer_has_no_chat_template_raises(tmp_path, template):
    path = write_jsonl(tmp_path / "any.jsonl", ROWS)
    tokenizer = None if template else PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer())

    with pytest.raises(BadInputError, match="needs a tokenizer with a chat template"):
        load(path, tokenizer=tokenizer, max_length=10)


def test_hub_when_offline_says_to_give_a_folder():
    # Arrange: the hub library reads this switch when it is imported
    code = (
        "from areal_core import BadInputError; from areal_gsm8k.dataset import get_gsm8k_dataset\n"
        "try: get_gsm8k_dataset(None, 'train', kind='rl')\n"
        "except BadInputError as error: print(error)"
    )

    # Act
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
    )

    # Assert
    assert "cannot load openai/gsm8k (main, train) from the hub" in result.stdout, result.stderr
    assert "give a local folder" in result.stdout


def test_plugin_when_listed_imports_nothing_heavy():
    code = (
        "import sys; from areal_gsm8k import plugin; plugin.areal_datasets(); plugin.areal_rewards();"
        "import areal_gsm8k.reward;"
        "sys.exit(', '.join({'torch', 'datasets', 'sympy', 'pyarrow', 'transformers'} & set(sys.modules)) or 0)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (result.returncode, result.stderr) == (0, "")
