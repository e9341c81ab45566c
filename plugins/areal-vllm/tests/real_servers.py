"""Tiny models, servers and trainers for the tests that run real vLLM servers, and transformers as their reference."""

from __future__ import annotations

import asyncio
import functools
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from areal_core.api.configs import InferenceEngineConfig, OptimizerConfig, TrainEngineConfig
from areal_core.api.engine_api import TrainEngine
from areal_core.api.io_struct import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    SaveLoadMeta,
    WeightUpdateMeta,
)
from areal_vllm.config import VLLMConfig
from areal_vllm.engine import VLLMEngine

VOCABULARY = 160
#: Of the log-probs: fp32 against fp32.
TOLERANCE = 1e-4
#: So few tokens at once that prompts of several requests are computed in parts.
ARGS = {"max-model-len": 512, "max-num-seqs": 64, "max-num-batched-tokens": 256}


def save_model(path: Path, *, seed: int = 0, hidden: int = 128, layers: int = 4, tied: bool = True) -> str:
    """A random Qwen2 of about 4 MB in ``path``. Heads of 32 numbers: vLLM has no smaller ones on a CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.12,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return str(path)


def word(token: int) -> str:
    return f"w{token:03}"


def save_tokenizer(path: Path) -> None:
    """Beside a model: one word to a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word(token): token for token in range(VOCABULARY)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=word(1), pad_token=word(0), unk_token=word(0))
    fast.save_pretrained(path)


def start_engine(
    backend: str, model: str, *, log_dir: Path | None = None, addresses: list[str] | None = None, **options: Any
) -> VLLMEngine:
    """An engine over real servers that it starts itself, unless ``addresses`` says where some are."""
    options.setdefault("args", ARGS)
    config = InferenceEngineConfig(
        backend=backend,
        dtype="float32",
        addresses=addresses or [],
        log_dir=log_dir,
        setup_timeout=400.0,
        plugin_options={"vllm": VLLMConfig(**options)},
    )
    engine = VLLMEngine(config)
    engine.initialize(model)
    return engine


def make_trainer(model: str, **fields: Any) -> TrainEngine:
    """An fsdp engine in this process."""
    from areal_core.api.alloc import ParallelStrategy
    from areal_fsdp.engine import FSDPEngine

    engine = FSDPEngine(TrainEngineConfig(path=model, dtype="float32", optimizer=OptimizerConfig(), **fields))
    engine.create_process_group(ParallelStrategy())
    engine.initialize()
    return engine


def disturb(trainer: Any, seed: int) -> None:
    """Other weights in the trainer, as a large step would make."""
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in trainer.ready().model.parameters() if parameter.requires_grad]
    assert trained
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def exported(trainer: TrainEngine, path: Path) -> Path:
    """The trainer's weights as a Hugging Face folder, adapters merged."""
    trainer.save(SaveLoadMeta(path=path))
    return path


@functools.lru_cache(maxsize=4)
def _network(path: str, written: tuple[int, ...]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def forward(model: Path | str, ids: list[int]) -> torch.Tensor:
    """Log-probs of each token after the first, fp32 ``[L - 1, V]``, by transformers."""
    files = sorted(Path(model).glob("*.safetensors"))
    network = _network(str(model), tuple(file.stat().st_mtime_ns for file in files))
    with torch.no_grad():
        return torch.log_softmax(network(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)


def gap(model: Path | str, response: ModelResponse, version: int, temperature: float = 1.0) -> float:
    """How far the log-probs of a version's tokens are from a model's, given all tokens before them, at most."""
    where = [i for i, found in enumerate(response.output_versions) if found == version]
    logits = forward(model, [*response.input_tokens, *response.output_tokens])
    logprobs = torch.log_softmax(logits[[response.input_len + i - 1 for i in where]] / temperature, dim=-1)
    tokens = torch.tensor([response.output_tokens[i] for i in where])
    given = torch.tensor([response.output_logprobs[i] for i in where])
    return float((given - logprobs.gather(1, tokens[:, None])[:, 0]).abs().max())


def check_against(models: dict[int, Path | str], response: ModelResponse, temperature: float = 1.0) -> None:
    """Every token's log-prob is that of the model of its version, and not that of another's."""
    for version in sorted(set(response.output_versions)):
        for other, model in models.items():
            largest = gap(model, response, version, temperature)
            if other == version:
                assert largest < TOLERANCE, f"{largest} at tokens of version {version}"
            elif response.output_versions.count(version) >= 8:
                assert largest > 100 * TOLERANCE, f"{largest} at tokens of version {version} against {other}"


def request(ids: list[int], **options: Any) -> ModelRequest:
    options.setdefault("max_new_tokens", 16)
    return ModelRequest(input_ids=ids, gconfig=GenerationHyperparameters(**options))


def prompts(count: int, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCABULARY, (count, length), generator=generator).tolist()


def generated_tokens(address: str) -> int:
    """Of a server, by its own metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return int(
        sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} ([\d.e+]+)$", text, re.M))
    )


async def until_generated(engine: VLLMEngine, count: int, since: dict[str, int]) -> None:
    """Return when every server has generated ``count`` tokens since then."""
    deadline = time.monotonic() + 120
    for address, start in since.items():
        while await asyncio.to_thread(generated_tokens, address) < start + count:
            assert time.monotonic() < deadline, "the servers do not generate"
            await asyncio.sleep(0.02)


def tokens_so_far(engine: VLLMEngine) -> dict[str, int]:
    return {replica.address: generated_tokens(replica.address) for replica in engine.fleet.live}


async def update_in_flight(
    engine: VLLMEngine, trainer: TrainEngine, meta: WeightUpdateMeta, requests: list[ModelRequest]
) -> list[ModelResponse]:
    """Send new weights while ``requests`` are half done."""
    since = tokens_so_far(engine)
    running = [asyncio.create_task(engine.agenerate(one)) for one in requests]
    await until_generated(engine, 8 * len(requests) // len(since), since)
    await asyncio.to_thread(send, engine, trainer, meta)
    return list(await asyncio.gather(*running))


def send(engine: VLLMEngine, trainer: TrainEngine, meta: WeightUpdateMeta) -> None:
    """Bring the trainer's weights into the servers as the trainers do."""
    engine.pause_generation()
    try:
        trainer.update_weights(meta)
        engine.set_version(meta.version)
    finally:
        engine.continue_generation()
