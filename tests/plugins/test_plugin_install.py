"""A plugin package installed by pip into an environment of its own, over the packages of this one."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent / "fixture_plugin"

LETTERS = "abcdefghijklmnopqrstuvwxyz"

RUN = """\
trainer: rl
actor: {path: model, backend: "fsdp:d1", optimizer: {lr: 1e-4}}
train_dataset: {name: digits, digits: {size: 5}}
reward: {name: count, count: {enough: 2}}
workflow: {name: hinted}
rollout: {backend: local}
"""

PROGRAM = """
import json, sys
from pathlib import Path
from areal_core.api.load import load_run_config
from areal_core.config import plugin_keywords
from areal_core.plugins import get_plugin_manager

manager = get_plugin_manager()
config = load_run_config(Path("run.yaml"), ["workflow.hinted.hint=Digits!"])
rows = manager.load("areal_datasets", "digits")(
    None, "train", kind="rl", tokenizer=None, max_length=None, **plugin_keywords(config.train_dataset)
)
score = manager.load("areal_rewards", "count")("", "a1", [], [], **plugin_keywords(config.reward))
workflow = manager.load("areal_workflows", "hinted")
print(json.dumps([len(rows), score, workflow.__mro__[1].__name__, plugin_keywords(config.workflow)]))
"""


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AREAL_", "PYTHON", "PIP_"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that sees the packages of this one, and the fixture plugin."""
    pytest.importorskip("hatchling")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    # A .pth file rather than system site packages: the environment below may be virtual itself.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(where) / "outer.pth").write_text("\n".join(lines) + "\n")
    build = folder / "package"
    subprocess.run(["cp", "-r", str(PACKAGE), str(build)], check=True)  # the build leaves nothing in the checkout
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    result = run(python, "-m", "pip", "install", *options, build, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return python


def areal(python: Path, *arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(python, "-m", "areal_core.cli.main", *arguments, cwd=cwd, **environment)


@pytest.mark.slow
def test_plugin_when_installed_by_pip_is_listed(python: Path, tmp_path: Path) -> None:
    result = areal(python, "plugins", "list", "--json", cwd=tmp_path)

    plugins: list[dict[str, Any]] = json.loads(result.stdout)["plugins"]
    (plugin,) = [plugin for plugin in plugins if plugin["distribution"] == "areal-fixture"]
    assert (plugin["version"], plugin["status"], plugin["name"]) == ("1.2.3", "ok", "fixture")
    assert [item["name"] for item in plugin["registrations"]] == ["hinted", "count", "digits"]


@pytest.mark.slow
def test_plugin_when_installed_by_pip_can_be_configured_and_used(python: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)

    result = run(python, "-c", PROGRAM, cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [5, 0.5, "RolloutWorkflow", {"hint": "Digits!"}]


@pytest.mark.slow
def test_plugin_when_installed_by_pip_is_trained_with(python: Path, tmp_path: Path) -> None:
    write_model = (
        "import torch\nfrom pathlib import Path\nfrom areal_arithmetic.model import write_model_folder\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "torch.manual_seed(0)\nfolder = Path('model')\n"
        "write_model_folder(folder, hidden=32, layers=2, heads=2, overwrite=False)\n"
        "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)\n"
    )
    made = run(python, "-c", write_model, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert made.returncode == 0, made.stderr
    (tmp_path / "run.yaml").write_text(RUN)
    overrides = ("total_train_steps=2", "num_threads=1", "gconfig={n_samples: 4, max_new_tokens: 8}")
    overrides += ("train_dataset.batch_size=2", "actor.dtype=float32", "checkpoint.save_final=false")
    overrides += (f"reward.count={{characters: {LETTERS}, enough: 8}}",)

    result = areal(python, "train", "run.yaml", *overrides, cwd=tmp_path, OMP_NUM_THREADS="1")

    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "runs" / "run"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written = [json.loads(line) for path in folder.glob("trajectories/train-*.jsonl") for line in path.open()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert len(written) == 16 and all("Answer with digits." in line["prompt"] for line in written)
    letters = [sum(line["completion"].count(letter) for letter in LETTERS) for line in written]
    assert [line["reward"] for line in written] == pytest.approx([min(1.0, count / 8) for count in letters])
    assert any(letters), "rewards that are all 0 would show nothing"


@pytest.mark.slow
def test_plugin_when_disabled_is_unknown_and_the_error_says_so(python: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)

    result = areal(python, "config", "check", "run.yaml", cwd=tmp_path, AREAL_DISABLE_PLUGINS="areal-fixture")

    assert result.returncode == 2
    assert "reward.name: unknown reward 'count'" in result.stderr
    assert "areal-fixture is disabled: disabled by AREAL_DISABLE_PLUGINS" in result.stderr


def test_environment_when_plugin_is_not_installed_does_not_know_it() -> None:
    result = areal(Path(sys.executable), "plugins", "show", "areal-fixture", cwd=PACKAGE)

    assert result.returncode == 2 and "no plugin has the name 'areal-fixture'" in result.stderr
