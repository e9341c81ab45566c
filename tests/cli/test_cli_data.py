from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_core.cli.main import run as areal

HERE = Path(__file__).parent
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def make_tokenizer(tmp_path: Path):
    """Writes a tokenizer that counts words; ``go`` is its generation prompt."""

    def make(template: str | None = TEMPLATE) -> str:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer(models.WordLevel({"<unk>": 0, "go": 1}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return make


@pytest.fixture
def run_yaml(tmp_path: Path, make_tokenizer) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
trainer: rl
actor: {{path: {make_tokenizer()}, optimizer: {{}}}}
reward: {{name: "cli_rewards:length_reward_fn"}}
train_dataset: {{name: "cli_rewards:rows"}}
"""
    )
    return str(path)


def test_preview_when_a_config_is_given_then_rows_and_prompt_tokens(
    run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert areal(["data", "preview", run_yaml, "-n", "1", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["kind"], result["columns"]) == (2, "rl", ["messages", "answer", "n"])
    assert result["tokens"] == {"min": 4, "median": 9, "max": 9, "of_rows": 2}  # "train as rl? go" is four words
    assert [(item["row"]["n"], item["tokens"]) for item in result["preview"]] == [(3, 4)]


def test_preview_when_printed_then_messages_are_read_as_a_chat_and_long_values_are_cut(
    run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert areal(["data", "preview", run_yaml, "--split", "test", "-n", "1"]) == 0

    output = capsys.readouterr().out
    assert "split test, as rl: 2 rows" in output and "prompt tokens of all rows: 4 to 9" in output
    assert "messages [user]: test as rl?" in output and "(1000 characters)" in output


def test_preview_when_overrides_follow_then_they_count(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["data", "preview", run_yaml, "train_dataset.split=other", "train_dataset.limit=1", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["split"], result["rows"]) == ("other", 1)


def test_preview_when_named_then_no_config_and_no_tokenizer_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert areal(["data", "preview", "--name", "cli_rewards:rows", "--kind", "sft", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["split"], result["kind"], result["tokens"], len(result["preview"])) == ("train", "sft", None, 2)


def test_preview_when_named_with_a_tokenizer_then_sft_tokens_have_no_generation_prompt(
    make_tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "preview", "--name", "cli_rewards:rows", "--kind", "sft", "--tokenizer", make_tokenizer()]

    assert areal([*arguments, "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["tokens"]["min"] == 3


def test_preview_when_the_runs_tokenizer_is_missing_then_rows_are_shown_with_a_warning(
    run_yaml: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = f"actor.path={tmp_path / 'absent'}"

    assert areal(["data", "preview", run_yaml, missing]) == 0
    output = capsys.readouterr()
    assert "2 rows" in output.out and "tokens are not counted" in output.err

    assert areal(["data", "preview", run_yaml, missing, "train_dataset.max_length=5"]) == 2
    assert "no tokenizer at" in capsys.readouterr().err


def test_preview_when_the_tokenizer_has_no_chat_template_then_exit_2(
    make_tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "preview", "--name", "cli_rewards:rows", "--tokenizer", make_tokenizer(None)]

    assert areal(arguments) == 2

    assert "chat_template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either a CONFIG or --name"),
        (["run.yaml", "--name", "x"], "give either a CONFIG or --name"),
        (["absent.yaml"], "absent.yaml: there is no such file"),
        (["--name", "gsm8q"], "unknown dataset 'gsm8q'"),
        (["--name", "cli_rewards:rows", "--kind", "x"], "--kind: must be one of"),
        (["--name", "cli_rewards:rows", "--split", "empty"], "has no rows in split 'empty'"),
        (["--name", "cli_rewards:rows", "--tokenizer", "/absent"], "--tokenizer: no tokenizer at '/absent'"),
        (["--name", "cli_rewards:rows", "--option", "a=1"], "has no options of its own"),
    ],
)
def test_preview_when_the_input_is_bad_then_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert areal(["data", "preview", *arguments]) == 2

    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--section", "valid_dataset"], "has no section valid_dataset"),
        (["--section", "x"], "--section: must be"),
        (["--option", "a=1"], "--option: goes with --name"),
    ],
)
def test_preview_when_options_do_not_fit_a_config_then_exit_2(
    run_yaml: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert areal(["data", "preview", run_yaml, *arguments]) == 2

    assert words in capsys.readouterr().err


def test_preview_when_rows_have_images_then_their_sizes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code = areal(["data", "preview", "--name", "cli_rewards:image_rows", "--json"])

    (item,) = json.loads(capsys.readouterr().out)["preview"]
    assert code == 0
    assert item["row"]["messages"][0]["content"] == [{"type": "image", "image": "<image of 3 x 2 pixels>"}]
    assert item["row"]["images"] == ["<array 2 x 3 x 3>", "<4 bytes>"]


def test_preview_when_a_demonstration_calls_tools_then_calls_are_shown_and_tools_counted(
    make_tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% for t in tools or [] %}tool {% endfor %}{% for m in messages %}{{ m.content or 'call' }} {% endfor %}"
    )
    arguments = ["data", "preview", "--name", "cli_rewards:tool_rows", "--tokenizer", make_tokenizer(template)]

    assert areal([*arguments, "--kind", "sft"]) == 0

    output = capsys.readouterr().out
    assert "messages [assistant]: -> add({'x': 1})" in output and "messages [tool]: 2" in output
    assert "--- row 0 (6 tokens)" in output  # the tool, "one more", the call, its result, "two"
