"""Tiny models, batches, losses and engines of the fsdp engine's tests; also imported by their worker processes."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput, as_stat
from areal_core.api.configs import MicroBatchConfig, OptimizerConfig, TrainEngineConfig
from areal_core.api.io_struct import FinetuneSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

VOCAB = 61
WINDOW = 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Larger than usual, so that attention is far from uniform and a leak between sequences shows.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_config(arch: str) -> Any:
    """qwen2 (tied), qwen3, llama (untied), gemma3 and mistral (windows shorter than the sequences)."""
    if arch == "qwen2":
        return transformers.Qwen2Config(**_COMMON, tie_word_embeddings=True)
    if arch == "qwen3":
        return transformers.Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=False)
    if arch == "llama":
        return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=False)
    if arch == "mistral":
        return transformers.MistralConfig(**_COMMON, sliding_window=WINDOW, tie_word_embeddings=False)
    if arch == "gemma3":
        return transformers.Gemma3TextConfig(
            **_COMMON,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
            final_logit_softcapping=5.0,
        )
    if arch == "gemma2":
        return transformers.Gemma2Config(
            **_COMMON, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
        )
    if arch == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **_COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
        )
    if arch == "gpt_oss":
        return transformers.GptOssConfig(
            **{**_COMMON, "head_dim": 8}, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
        )
    if arch == "granite":
        return transformers.GraniteConfig(**_COMMON, logits_scaling=3.0)
    if arch == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    if arch == "opt":  # dropout rates as plain numbers
        return transformers.OPTConfig(
            **{k: _COMMON[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
            ffn_dim=48,
            word_embed_proj_dim=32,
            max_position_embeddings=128,
            dropout=0.1,
            attention_dropout=0.1,
            bos_token_id=1,
            eos_token_id=2,
        )
    if arch == "mamba":
        return transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
        )
    return transformers.AutoConfig.for_model(arch, **_COMMON, head_dim=8)


_FOLDERS = tempfile.TemporaryDirectory(prefix="fsdp-models-")


def make_folder(arch: str, folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder with random fp32 weights, a copy of its own."""
    first = Path(_FOLDERS.name) / f"{arch}-{seed}-{_COMMON['vocab_size']}"
    if not first.exists():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(model_config(arch), dtype=torch.float32)
        model.save_pretrained(first)
    shutil.copytree(first, folder, dirs_exist_ok=True)
    return folder


def load_reference(folder: Path, *, attention: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.set_experts_implementation("eager")  # the grouped kernel has no fp64
    return model.eval()


def make_batch(groups: list[list[int]], *, seed: int = 0, prompt: tuple[int, int] = (2, 14)) -> PackedBatch:
    """One sequence per completion length; those of one inner list share a prompt.

    Every third completion has an untrained stretch in it, as a second turn's prompt makes one.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    ids, masks, group_ids, prompt_lens = [], [], [], []
    for group, lengths in enumerate(groups):
        prompt_ids = torch.randint(3, VOCAB, (draw(*prompt),), generator=generator)
        for length in lengths:
            completion = torch.randint(3, VOCAB, (length,), generator=generator)
            mask = torch.ones(length, dtype=torch.bool)
            if length > 4 and len(ids) % 3 == 0:
                mask[2:4] = False
            ids.append(torch.cat([prompt_ids, completion]))
            masks.append(torch.cat([torch.zeros(len(prompt_ids), dtype=torch.bool), mask]))
            group_ids.append(group)
            prompt_lens.append(len(prompt_ids))
    lengths_tensor = torch.tensor([0, *(len(x) for x in ids)])
    total = int(lengths_tensor.sum())
    return PackedBatch(
        lengths_tensor.cumsum(0).to(torch.int32),
        {
            "input_ids": torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64),
            "loss_mask": torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool),
            "advantages": torch.randn(total, generator=generator),
        },
        {
            "group_ids": torch.tensor(group_ids, dtype=torch.int64),
            "prompt_lens": torch.tensor(prompt_lens, dtype=torch.int32),
        },
    )


def ragged_batch(seed: int = 0) -> PackedBatch:
    return make_batch([[7, 3, 12, 1], [5], [9, 9, 2], [16, 4], [1, 6]], seed=seed)


def with_supports(batch: PackedBatch, *, seed: int = 0, width: int = 9) -> PackedBatch:
    """Each trained token gets a support of 1 to ``width`` tokens, the token among them; every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    supports = torch.full((batch.num_tokens, width), -1, dtype=torch.int32)
    for at in torch.nonzero(batch["loss_mask"]).flatten().tolist():
        if at % 5 == 0:
            continue
        token = int(batch["input_ids"][at])
        others = [i for i in torch.randperm(VOCAB, generator=generator).tolist() if i != token]
        size = int(torch.randint(1, width + 1, (), generator=generator))
        kept = torch.tensor(sorted([token, *others[: size - 1]]), dtype=torch.int32)
        supports[at, : len(kept)] = kept
    return batch.with_tokens(supports=supports)


def policy_loss(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    """Not linear in the log-probs, and different for every token."""
    mask = batch["loss_mask"]
    loss = -(torch.exp(output.logprobs / 4) * batch["advantages"] * mask).sum()
    return LossOutput(loss, {"logprob": as_stat(output.logprobs, mask), "tokens": as_stat(mask.float(), mask | ~mask)})


def value_loss(output: TokenOutput, batch: PackedBatch) -> LossOutput:
    assert output.values is not None
    mask = batch["loss_mask"]
    return LossOutput((((output.values - batch["advantages"]) ** 2) * mask).sum(), {})


def token_weight(batch: PackedBatch) -> torch.Tensor:
    return batch["loss_mask"].sum()


def make_engine(
    folder: Path,
    *,
    backend: str = "fsdp:d1",
    optimizer: OptimizerConfig | None = None,
    options: FSDPConfig | None = None,
    max_tokens: int | None = None,
    role: str = "actor",
    ft_spec: FinetuneSpec | None = None,
    seed: int = 0,
    **fields: Any,
) -> FSDPEngine:
    """An initialized fp32 engine."""
    config = TrainEngineConfig(
        path=str(folder),
        backend=backend,
        optimizer=optimizer,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=max_tokens),
        **{"dtype": "float32", **fields},
    )
    config.plugin_options = {"fsdp": options or FSDPConfig()}
    engine = FSDPEngine(config)
    engine.create_process_group(config.parsed_backend.parallel)
    torch.manual_seed(seed)
    engine.initialize(ft_spec, role=role)
    return engine


class LiveBytes:
    """Counts bytes of tensors from when they are added until nobody holds them."""

    def __init__(self) -> None:
        self.now = self.peak = self.largest = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        self.now += tensor.nbytes
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, tensor.nbytes)
        return tensor

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


def sgd(**fields: Any) -> OptimizerConfig:
    """A step that is the gradient itself, unless told otherwise: lr 1, no decay, no clipping."""
    return OptimizerConfig(**{"type": "sgd", "lr": 1.0, "weight_decay": 0.0, "gradient_clipping": 0.0, **fields})


def parameters_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of all weights by Hugging Face name. Every rank calls it."""
    from areal_fsdp.export import hf_tensors

    return {name: tensor.detach().clone() for name, tensor in hf_tensors(engine.model)}


def step_difference(engine: FSDPEngine, batch: PackedBatch, **kwargs: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Result of one ``train_batch``, and old minus new parameters: with ``sgd()`` the gradient."""
    before = parameters_of(engine)
    result = engine.train_batch(batch, policy_loss, token_weight, **kwargs)
    after = parameters_of(engine)
    return result, {name: before[name] - after[name] for name in before}


def reference_logprobs(model: Any, batch: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies ``[T]`` by transformers' own forward, one sequence at a time.

    Where a token has a support, all other logits are minus infinity.
    """
    logprobs, entropies = [], []
    supports = batch.with_tokens(supports=batch.tokens.get("supports", torch.full((batch.num_tokens, 1), -1)))
    for ids, mask, kept in zip(*(supports.sequences(n) for n in ("input_ids", "loss_mask", "supports")), strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        out = torch.zeros(len(ids), logits.shape[-1], dtype=torch.bool)
        for row, of in enumerate(kept[1:].tolist()):
            chosen = [i for i in of if i >= 0]
            if chosen:
                out[row] = True
                out[row, chosen] = False
        logp = torch.log_softmax(logits.masked_fill(out, -torch.inf), -1)[:-1]
        keep = mask[1:]
        zero = logp.new_zeros(1)
        terms = logp.exp() * logp.masked_fill(out[:-1], 0.0)
        logprobs.append(torch.cat([zero, logp.gather(-1, ids[1:, None])[:, 0] * keep]))
        entropies.append(torch.cat([zero, -terms.sum(-1) * keep]))
    return torch.cat(logprobs), torch.cat(entropies)


def reference_step(folder: Path, batch: PackedBatch, temperature: float = 1.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in fp64 by plain autograd over single sequences."""
    model = load_reference(folder)
    logprobs, _ = reference_logprobs(model, batch, temperature)
    loss = policy_loss(TokenOutput(logprobs), batch).loss / token_weight(batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


OPTIMIZERS: dict[str, tuple[OptimizerConfig, dict[str, Any]]] = {
    "muon": (OptimizerConfig(type="muon", lr=1e-2, weight_decay=0.1), {}),
    "sgd": (OptimizerConfig(type="sgd", lr=0.1, momentum=0.9, weight_decay=0.0), {}),
    "states": (OptimizerConfig(lr=1e-3, state_dtype="bfloat16"), {}),
    "stochastic": (OptimizerConfig(lr=1e-3, state_dtype="bfloat16", rounding="stochastic"), {}),
    "kahan": (OptimizerConfig(lr=1e-3, rounding="kahan"), {"dtype": "bfloat16", "param_dtype": "bfloat16"}),
}


def optimizer_engine(models: Path, kind: str, backend: str = "fsdp:d1") -> FSDPEngine:
    """An engine on qwen3 with one of OPTIMIZERS."""
    optimizer, fields = OPTIMIZERS[kind]
    return make_engine(models / "qwen3", backend=backend, optimizer=optimizer, **fields)
