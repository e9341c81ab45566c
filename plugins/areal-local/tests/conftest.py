"""Tiny random models, and engines over them that end with the test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_local import compiled
from areal_local.config import LocalConfig
from areal_local.engine import LocalEngine

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    # Wide enough that greedy continuations are varied and attention matters.
    "initializer_range": 0.15,
}
_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "eos_token_id": None, "bos_token_id": None}


def build_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    common = {**_COMMON, **changes}
    small = {**_SMALL, **changes}
    t = transformers
    makers: dict[str, Callable[[], Any]] = {
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**common)),
        "qwen2-sliding": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**common, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        ),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=16)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**common)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**common, sliding_window=8)),
        # At init gemma's norms multiply by (1 + 0), and its tied embedding makes logits that repeat one token.
        "gemma3": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(**{**common, "tie_word_embeddings": False}, head_dim=16, sliding_window=8)
        ),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**{**common, "tie_word_embeddings": False}, head_dim=16, sliding_window=8)
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_positions=256, n_embd=64, **{**small, "initializer_range": 0.3})
        ),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(hidden_size=64, **{**small, "initializer_range": 0.3})),
    }
    return makers[kind]().eval()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with torch alone, as where numba is missing or the device is another."""
    monkeypatch.setattr(compiled, "_kernels", lambda: None)


@pytest.fixture(params=["compiled", "torch"])
def computed_by(request: pytest.FixtureRequest) -> str:
    """Run the test with the compiled loops, and with torch alone."""
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return request.param


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return build_model


@pytest.fixture
def model() -> Any:
    return build_model("qwen3")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``build_model("qwen3")`` in Hugging Face layout."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    build_model("qwen3").save_pretrained(folder)
    return folder


def start_engine(folder: Path, *, keep_kv: bool = False, staleness: int = 1, **options: Any) -> LocalEngine:
    config = InferenceEngineConfig(
        max_head_offpolicyness=staleness,
        weight_update_keep_kv=keep_kv,
        plugin_options={"local": LocalConfig(**options)},
    )
    engine = LocalEngine(config)
    engine.initialize(str(folder))
    return engine


@pytest.fixture
def start(model_folder: Path) -> Iterator[Callable[..., LocalEngine]]:
    """``start(keep_kv=False, staleness=1, **local_options)``: an engine that has loaded ``model_folder``."""
    engines: list[LocalEngine] = []

    def run(folder: Path = model_folder, **options: Any) -> LocalEngine:
        engines.append(start_engine(folder, **options))
        return engines[-1]

    yield run
    for engine in engines:
        engine.destroy()


@pytest.fixture(scope="session")
def hosts(model_folder: Path) -> Iterator[Callable[[str], LocalEngine]]:
    """``hosts("thread" or "process")``: an engine of four rows that all tests share; a process takes long to start."""
    engines: dict[str, LocalEngine] = {}

    def get(mode: str) -> LocalEngine:
        if mode not in engines:
            engines[mode] = start_engine(model_folder, process=mode == "process", max_batch_size=4)
        return engines[mode]

    yield get
    for engine in engines.values():
        engine.destroy()


@pytest.fixture(params=["thread", "process"])
def host_engine(request: pytest.FixtureRequest, hosts: Callable[[str], LocalEngine]) -> LocalEngine:
    """The shared engines, one after the other, with the weights of ``model_folder`` at version 0."""
    engine = hosts(request.param)
    engine.update_weights_from_memory(build_model("qwen3").named_parameters(), 0)
    return engine


@pytest.fixture
def make_engine() -> Iterator[Callable[..., LocalEngine]]:
    """``make_engine(model, tokenizer=None, keep_kv=False, **local_options)``."""
    engines: list[LocalEngine] = []

    def make(model: Any, tokenizer: Any = None, keep_kv: bool = False, **options: Any) -> LocalEngine:
        config = InferenceEngineConfig(weight_update_keep_kv=keep_kv, plugin_options={"local": LocalConfig(**options)})
        engines.append(LocalEngine.from_model(model, config, tokenizer))
        return engines[-1]

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def native_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``native_dense:SPEC`` and ``native_moe:SPEC`` are import paths, also in a process."""
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", here)
    yield
    for name in ("native_dense", "native_moe"):
        sys.modules.pop(name, None)


@pytest.fixture
def start_native(native_models: None) -> Iterator[Callable[..., LocalEngine]]:
    """``start_native(folder, spec=None, dtype=None, **local_options)``: an engine with the native model of a spec."""
    engines: list[LocalEngine] = []

    def run(folder: Path, spec: str | None = None, dtype: str | None = None, **options: Any) -> LocalEngine:
        options = {"local": LocalConfig(model_spec=spec, **options)}
        engines.append(LocalEngine(InferenceEngineConfig(dtype=dtype, plugin_options=options)))
        engines[-1].initialize(str(folder))
        return engines[-1]

    yield run
    for engine in engines:
        engine.destroy()


@pytest.fixture
def transformers_greedy() -> Callable[[Any, list[int], int], list[int]]:
    """The next ``count`` tokens of a prompt, by ``transformers.generate``."""

    def continue_greedily(model: Any, prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()

    return continue_greedily


@pytest.fixture
def generate() -> Callable[..., list[ModelResponse]]:
    """Run requests together: ``generate(engine, [(prompt, {gconfig fields}), ...])``. Admitted in one step.

    ``return_supports`` may stand among the fields.
    """

    def request(prompt: list[int], return_supports: bool = False, **fields: Any) -> ModelRequest:
        gconfig = GenerationHyperparameters(**fields)
        return ModelRequest(input_ids=list(prompt), gconfig=gconfig, return_supports=return_supports)

    def run(engine: LocalEngine, jobs: list[tuple[list[int], dict[str, Any]]], **common: Any) -> list[ModelResponse]:
        async def main() -> list[ModelResponse]:
            engine.pause_generation()
            tasks = [
                asyncio.ensure_future(engine.agenerate(request(prompt, **{**common, **fields})))
                for prompt, fields in jobs
            ]
            await asyncio.sleep(0)
            engine.continue_generation()
            return list(await asyncio.gather(*tasks))

        return asyncio.run(main())

    return run


def plain_logprobs(model: Any, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of ``tokens[start:]`` by one plain forward, fp64 softmax."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    logp = torch.log_softmax(logits, dim=-1)
    index = torch.arange(start, len(tokens))
    return logp[index - 1, torch.tensor(tokens)[index]].float()


@pytest.fixture
def reference_logprobs() -> Callable[..., torch.Tensor]:
    return plain_logprobs
