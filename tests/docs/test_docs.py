"""The documentation tells the truth: its code runs, its commands and keys exist, its links lead somewhere."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml

from areal_core.api.batch import PackedBatch, TokenOutput
from areal_core.api.configs import PPOActorConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelResponse
from areal_core.api.load import load_run_config
from areal_core.plugins.manager import get_plugin_manager
from areal_core.trainer.loading import build_algorithm

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "plugins").glob("*/README.md"),
    *(ROOT / "plugins_contrib").glob("*/README.md"),
]
GENERATED = {"hooks.md", "config.md", "cli.md"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def names_of(page: str) -> dict[str, Any]:
    """What the Python blocks of a page define."""
    namespace: dict[str, Any] = {}
    for code in blocks(ROOT / page, "python"):
        exec(compile(code, page, "exec"), namespace)  # noqa: S102 - the repository's own pages
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_when_linking_to_a_file_finds_it(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in GENERATED and "```python" in p.read_text()], ids=lambda page: page.name
)
def test_python_blocks_when_run_raise_nothing(page):
    assert names_of(str(page.relative_to(ROOT)))


def test_commands_when_shown_exist():
    # Arrange
    from areal_core.cli.main import build_command

    shown = set()
    for page in PAGES:
        for line in page.read_text().splitlines():
            if match := re.match(r"(?:    |\$ )?areal ([a-z].*)", line):
                shown.add(tuple(re.match(r"[a-z ]+", match[1])[0].split()[:2]))

    # Act
    unknown = []
    for words in shown - {("launch",)}:
        command: Any = build_command(list(words))
        for word in words:
            if not hasattr(command, "commands"):
                break
            command = command.commands.get(word)
            if command is None:
                unknown.append(words)
                break

    # Assert
    assert len(shown) > 5
    assert unknown == []


@pytest.mark.parametrize("config", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_example_configuration_when_loaded_is_valid(config):
    loaded = load_run_config(config, [])

    assert loaded.train_dataset.name


def test_readme_configuration_when_loaded_is_valid(tmp_path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    assert yaml.safe_load(text)["trainer"] == "rl"
    (tmp_path / "run.yaml").write_text(text)

    config = load_run_config(tmp_path / "run.yaml", [])

    assert config.valid_dataset.path == "data/gsm8k"


@pytest.mark.parametrize("page", ["README.md", "docs/plugins/reward.md"])
def test_reward_example_when_called_scores(page):
    reward = names_of(page)["brief_reward_fn"]

    assert reward("", "It is 42", None, [1] * 10, answer=42) == 1.0
    assert reward("", "It is 42", None, [1] * 300, answer="42", other=1) == 0.5
    assert reward("", "It is 41", None, [1], answer="42") == 0.0


def test_reward_example_when_tried_by_import_path_scores(tmp_path):
    # Arrange: as the README says it, in the current directory
    (tmp_path / "my_rewards.py").write_text(blocks(ROOT / "README.md", "python")[0])
    command = ["reward", "try", "my_rewards:brief_reward_fn", "--completion", "It is 42", "--answer", "42", "--json"]

    # Act
    result = subprocess.run(
        [sys.executable, "-m", "areal_core.cli.main", *command], capture_output=True, text=True, cwd=tmp_path
    )

    # Assert
    assert result.returncode == 0, result.stderr
    assert '"value": 1.0' in result.stdout


def test_named_rewards_example_when_tried_gives_their_sum(tmp_path):
    # Arrange: the page's functions and its configuration, in the current directory
    page = ROOT / "docs/plugins/reward.md"
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks(page, "python")))
    (text,) = blocks(page, "yaml")
    (tmp_path / "run.yaml").write_text(f"trainer: rl\nactor: {{path: m}}\ntrain_dataset: {{name: arithmetic}}\n{text}")
    command = ["reward", "try", "run.yaml", "--completion", "It is 42", "--answer", "42", "--json"]

    # Act
    result = subprocess.run(
        [sys.executable, "-m", "areal_core.cli.main", *command], capture_output=True, text=True, cwd=tmp_path
    )

    # Assert
    assert result.returncode == 0, result.stderr
    assert '"value": 1.2' in result.stdout


def test_dataset_example_when_called_makes_disjoint_splits():
    make = names_of("docs/plugins/dataset.md")["get_squares_dataset"]

    train, test = (make(None, split, kind="rl", tokenizer=None, max_length=None, size=5) for split in ("train", "test"))

    assert train[3] == {"messages": [{"role": "user", "content": "3 * 3 = ?"}], "answer": "9"}
    assert [row["answer"] for row in test] == ["25", "36", "49", "64", "81"]


@pytest.mark.parametrize(("texts", "rewarded"), [(("wrong", "right"), 1.0), (("wrong", "wrong"), None)])
def test_workflow_example_when_run_keeps_the_better_answer(texts, rewarded):
    # Arrange
    tokenizer = SimpleNamespace(
        eos_token_id=0,
        pad_token_id=0,
        apply_chat_template=lambda messages, **kwargs: [7, 8],
        decode=lambda ids, **kwargs: texts[ids[0]],
    )
    answers = iter(range(2))

    class Engine:
        async def agenerate(self, request):
            output = [next(answers)]
            return ModelResponse(
                input_tokens=request.input_ids, output_tokens=output, output_logprobs=[-1.0], output_versions=[3]
            )

    async def reward(prompt, completion, prompt_ids, completion_ids, answer):
        return float(completion == answer)

    workflow = names_of("docs/plugins/workflow.md")["BestOfTwoWorkflow"](
        GenerationHyperparameters(n_samples=4), tokenizer, reward, keep_ties=False
    )

    # Act
    row = {"messages": [{"role": "user", "content": "?"}], "answer": "right", "_uid": "0-0"}
    trajectory = asyncio.run(workflow.arun_episode(Engine(), row))

    # Assert
    if rewarded is None:
        assert trajectory is None
    else:
        assert trajectory.reward == rewarded
        assert trajectory.input_ids.tolist() == [7, 8, 1]
        assert trajectory.versions.tolist() == [-1, -1, 3]


def test_agent_example_when_the_model_calls_its_tool_answers_and_scores():
    # Arrange: a client that calls the tool, and then says what the tool said
    requests = []

    async def create(*, model, messages, tools):
        requests.append(list(messages))
        call = SimpleNamespace(id="call00000", function=SimpleNamespace(name="square", arguments='{"x": 7}'))
        first = SimpleNamespace(content=None, tool_calls=[call])
        message = first if len(requests) == 1 else SimpleNamespace(content=messages[-1]["content"], tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    async def reward(prompt, completion, answer):
        return float(completion == answer)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    row = {"messages": [{"role": "user", "content": "7 * 7 = ?"}], "answer": "49"}

    # Act
    result = asyncio.run(names_of("docs/plugins/workflow.md")["SquareAgent"]().run(row, client, reward))

    # Assert
    assert result == 1.0 and requests[0] == row["messages"]
    assert requests[1][-1] == {"role": "tool", "tool_call_id": "call00000", "content": "49"}


@pytest.mark.parametrize("arguments", ['{"x": "7"}', '{"x": null}', "{}", '{"y": [1]}'])
def test_agent_example_when_the_model_calls_its_tool_wrongly_goes_on(arguments):
    # Arrange
    seen = []

    async def create(*, model, messages, tools):
        seen.append(messages[-1])
        call = SimpleNamespace(id="call00000", function=SimpleNamespace(name="square", arguments=arguments))
        message = SimpleNamespace(content="?", tool_calls=[call] if len(seen) == 1 else None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    async def reward(prompt, completion, answer):
        return float(completion == answer)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    row = {"messages": [{"role": "user", "content": "7 * 7 = ?"}], "answer": "49"}

    # Act
    result = asyncio.run(names_of("docs/plugins/workflow.md")["SquareAgent"]().run(row, client, reward))

    # Assert
    assert result == 0.0 and seen[1]["content"] == "x must be a number"


def test_library_example_when_it_plays_rows_gives_trajectories(tmp_path):
    # Arrange
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from areal_arithmetic.model import write_model_folder
    from areal_core.rollout.workflows.rlvr import RLVRWorkflow

    write_model_folder(tmp_path / "base", hidden=32, layers=2, heads=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "model")
    play, reward = names_of("docs/plugins/workflow.md")["play"], names_of("docs/plugins/reward.md")["brief_reward_fn"]
    workflow = RLVRWorkflow(GenerationHyperparameters(max_new_tokens=4), tokenizer, reward)
    rows = [{"messages": [{"role": "user", "content": f"{n} + 1"}], "answer": n + 1} for n in range(3)]

    # Act
    try:
        trajectories, stats = play(workflow, rows, str(tmp_path / "model"), tokenizer, group_size=2)
    finally:
        workflow.reward_fn.destroy()

    # Assert
    assert len(trajectories) == stats["rollout/accepted"] == stats["reward/calls"] == 6
    assert all(0 < t.loss_mask.sum() <= 4 for t in trajectories)


def test_options_of_an_import_path_when_bound_as_the_page_says_are_used():
    (code,) = re.findall(
        r"^    from functools.*?limit=100\)$", (ROOT / "docs/plugins/index.md").read_text(), re.M | re.S
    )
    code = re.sub(r"^    ", "", code, flags=re.M).replace("from my_rewards import brief_reward_fn", "")
    namespace = {"brief_reward_fn": names_of("docs/plugins/reward.md")["brief_reward_fn"]}
    exec(compile(code, "index.md", "exec"), namespace)  # noqa: S102 - the repository's own page

    assert namespace["strict_reward_fn"]("", "42", None, [1] * 150, answer=42) == 0.5


def test_algorithm_example_when_applied_follows_its_formula():
    # Arrange: two groups; sequences of 2, 3, 2 tokens, the first of each being prompt
    batch = PackedBatch(
        torch.tensor([0, 2, 5, 7], dtype=torch.int32),
        {"input_ids": torch.arange(7), "loss_mask": torch.tensor([0, 1, 0, 1, 1, 0, 1], dtype=torch.bool)},
        {"rewards": torch.tensor([1.0, 0.0, 5.0]), "group_ids": torch.tensor([4, 4, 9])},
    )
    logprobs = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0, 0.0, -4.0], requires_grad=True)
    algorithm = names_of("docs/plugins/algorithm.md")["Reinforce"](PPOActorConfig(path="model"))

    # Act
    batch, stats = algorithm.compute_advantages(batch)
    output = algorithm.loss(TokenOutput(logprobs=logprobs), batch)

    # Assert
    expected = torch.tensor([0.0, 0.5, 0.0, -0.5, -0.5, 0.0, 0.0])
    torch.testing.assert_close(batch["advantages"], expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(output.loss.detach(), torch.tensor(0.5 - 1.0 - 1.5), rtol=0, atol=1e-7)
    assert stats["advantage/abs_mean"] == pytest.approx(1 / 3)
    assert algorithm.loss_weight(batch) == 4


def test_tracker_example_when_logging_writes_lines(tmp_path):
    tracker = names_of("docs/plugins/tracker.md")["CsvTracker"](SimpleNamespace(path=tmp_path))

    tracker.log(1, {"rollout/reward": 0.5})
    tracker.close()

    assert (tmp_path / "metrics.csv").read_text() == "1,0.5,\n"


def test_command_example_when_added_is_a_command():
    app = typer.Typer()

    names_of("docs/plugins/index.md")["areal_commands"](app)

    assert [command.callback.__name__ for command in app.registered_commands] == ["width"]


def test_generated_pages_when_rendered_again_are_current():
    # Arrange
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    gen_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_docs)

    # Act
    stale = [name for name, render in gen_docs.PAGES.items() if (ROOT / "docs" / name).read_text() != render()]

    # Assert
    assert stale == [], "run python scripts/gen_docs.py"


def test_navigation_when_read_lists_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", text))

    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_algorithms_when_registered_have_a_page_and_an_example():
    # Arrange
    names = {entry.registration.name for entry in get_plugin_manager().registrations("areal_algorithms")}

    # Act
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "algorithms").glob("*.md")}
    examples = {path.stem for path in (ROOT / "examples" / "algorithms").glob("*.yaml")}

    # Assert
    assert names - pages.keys() == set() and names - examples == set()
    overview = (ROOT / "docs" / "algorithms.md").read_text()
    for name in names:
        assert all(f"## {part}" in pages[name] for part in ("Equation", "Source", "Configuration", "What to look at"))
        assert f"(algorithms/{name}.md)" in overview


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=lambda path: path.stem)
def test_algorithm_page_when_its_configuration_is_merged_into_the_example_is_valid(page, tmp_path):
    # Arrange
    example = yaml.safe_load((ROOT / "examples" / "algorithms" / f"{page.stem}.yaml").read_text())
    (snippet,) = blocks(page, "yaml")
    changes = yaml.safe_load(snippet)
    for key in {"reward", "rewards"} & changes.keys():
        example.pop({"rewards": "reward", "reward": "rewards"}[key], None)
        example.pop(key, None)
    for key, value in changes.items():
        example[key] = {**example.get(key, {}), **value}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(example))

    # Act
    config = load_run_config(tmp_path / "run.yaml", [])

    # Assert
    assert config.algorithm.name == page.stem
    algorithm = build_algorithm(config, get_plugin_manager())
    algorithm.check(group_size=config.gconfig.n_samples, has_ref=False, has_critic=config.critic is not None)
