from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from areal_arithmetic import plugin
from areal_arithmetic.model import write_model_folder
from areal_core import BadInputError

CHAT = [{"role": "user", "content": "Tom has 27 pens."}, {"role": "assistant", "content": "2+7=9\n#### 9"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_model_folder(path)
    return path


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_write_model_folder_when_loaded_makes_a_tiny_qwen3(folder):
    # Act
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)

    # Assert: 128 wide, 2 layers, tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (
        sum(p.numel() for p in model.parameters())
        == 391 * 128 + 2 * (128 * (128 + 64 + 64 + 128 + 3 * 384) + 320) + 128
    )


def test_tokenizer_when_encoding_gives_single_digits_and_round_trips(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    ids = tokenizer.encode("27+5=32\n#### 32")

    assert tokenizer.decode(ids) == "27+5=32\n#### 32"
    assert all(sum(c.isdigit() for c in tokenizer.decode([i])) <= 1 for i in ids)


def test_chat_template_when_masking_marks_the_assistant_and_its_end(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)

    text = "<|im_start|>user\nTom has 27 pens.<|im_end|>\n<|im_start|>assistant\n2+7=9\n#### 9<|im_end|>\n"
    trained = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert tokenizer.decode(trained) == "2+7=9\n#### 9<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_chat_template_when_prompting_is_a_prefix_of_the_chat(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"]

    assert tokenizer.apply_chat_template(CHAT)["input_ids"][: len(prompt)] == prompt


def test_write_model_folder_when_repeated_changes_nothing(folder, tmp_path):
    # Arrange
    before = contents(folder)

    # Act
    again = write_model_folder(folder)
    elsewhere = write_model_folder(tmp_path / "other")

    # Assert
    assert again == []
    assert sorted(elsewhere) == sorted(before)
    assert contents(folder) == contents(tmp_path / "other") == before


def test_write_model_folder_when_another_model_is_there_keeps_it_unless_told(folder, tmp_path):
    # Arrange
    write_model_folder(tmp_path, hidden=64)
    before = contents(tmp_path)

    # Act
    with pytest.raises(BadInputError, match=r"config\.json belongs to another model.*--overwrite"):
        write_model_folder(tmp_path)
    kept = contents(tmp_path)
    written = write_model_folder(tmp_path, overwrite=True)

    # Assert
    assert kept == before
    assert written == ["config.json"]
    assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize(
    ("shape", "message"), [({"hidden": 100, "heads": 8}, "--hidden 100"), ({"hidden": 130, "heads": 5}, "--heads")]
)
def test_write_model_folder_when_shape_is_no_model_raises(tmp_path, shape, message):
    with pytest.raises(BadInputError, match=message):
        write_model_folder(tmp_path / "model", **shape)
    assert list(tmp_path.iterdir()) == []


def test_write_model_folder_when_path_is_a_file_raises(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(BadInputError, match="cannot write the model folder"):
        write_model_folder(file)


def test_command_when_run_writes_the_folder(folder, tmp_path):
    # Arrange
    app = typer.Typer()
    plugin.areal_commands(app)

    # Act
    result = CliRunner().invoke(app, ["arithmetic", "init", str(tmp_path / "model")])

    # Assert
    assert result.exit_code == 0, result.output
    assert "config.json" in result.output
    assert contents(tmp_path / "model") == contents(folder)


def test_plugin_when_commands_are_added_imports_nothing_heavy():
    code = (
        "import sys, typer; from areal_arithmetic import plugin; app = typer.Typer(); plugin.areal_commands(app);"
        "plugin.areal_datasets(); plugin.areal_rewards();"
        "sys.exit(', '.join({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)) or 0)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (result.returncode, result.stderr) == (0, "")
