"""Meshes of 512 ranks on the fake process group: who is where, what each rank holds, and shapes of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from areal_core.api.alloc import ParallelStrategy
from areal_core.api.configs import TrainEngineConfig
from areal_core.errors import BadInputError
from areal_fsdp.attention import register_attention
from areal_fsdp.config import FSDPConfig
from areal_fsdp.layout import RowPart, make_model_input
from areal_fsdp.mesh import Mesh, build_mesh
from areal_fsdp.parallel import build_scorer, shard_model
from areal_fsdp.tensor_parallel import parallelize

WORLD = 512


@pytest.fixture
def join() -> Iterator[Callable[[int, ParallelStrategy, int], Mesh]]:
    """``join(rank, strategy, replicate)``: this process as one of the ranks."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    def start(rank: int, strategy: ParallelStrategy, replicate: int = 1) -> Mesh:
        stop()
        dist.init_process_group("fake", rank=rank, world_size=strategy.world_size)
        return build_mesh(strategy, replicate, torch.device("cpu"))

    def stop() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()

    yield start
    stop()


def members(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


@pytest.mark.parametrize("rank", [0, 137, 511])
@pytest.mark.parametrize("replicate", [1, 4])
def test_build_mesh_when_512_ranks_expected_groups_by_arithmetic(join: Any, rank: int, replicate: int) -> None:
    data, context, tensor = 16, 4, 8

    mesh = join(rank, ParallelStrategy(data=data, context=context, tensor=tensor), replicate)

    t, c, d = rank % tensor, rank // tensor % context, rank // (tensor * context)
    assert (mesh.tp_rank, mesh.cp_rank, mesh.dp_rank) == (t, c, d)
    assert (mesh.tp_size, mesh.cp_size, mesh.dp_size) == (tensor, context, data)
    assert members(mesh.tp_group) == [rank - t + i for i in range(tensor)]
    assert members(mesh.cp_group) == [rank + (i - c) * tensor for i in range(context)]
    assert members(mesh.dp_group) == [rank + (i - d) * tensor * context for i in range(data)]
    assert members(mesh.model_group) == [d * tensor * context + i for i in range(tensor * context)]
    assert mesh.fsdp_mesh is not None
    shards = data // replicate * context
    assert mesh.fsdp_mesh.shape == ((shards,) if replicate == 1 else (replicate, shards))
    assert mesh.fsdp_mesh.mesh_dim_names[-1] == "dp_shard_cp"


def big_model(**fields: Any) -> nn.Module:
    """The shapes of Qwen3 8B, without memory."""
    config = transformers.Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        **fields,
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parallelize_when_512_ranks_on_meta_expected_local_shapes_of_the_plan(
    join: Any, sequence_parallel: bool
) -> None:
    mesh = join(137, ParallelStrategy(data=32, context=2, tensor=8))
    model: Any = big_model()

    scorer = build_scorer(
        model,
        mesh,
        TrainEngineConfig(path=".", backend="fsdp:d1"),
        FSDPConfig(sequence_parallel=sequence_parallel),
        is_critic=False,
    )
    shard_model(scorer, mesh, torch.bfloat16, FSDPConfig())

    shapes = {name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in model.named_parameters()}
    shards = 64
    layer = "model.layers.1."
    assert shapes[f"{layer}self_attn.q_proj.weight"] == ((4096, 4096), (4096 // 8 // shards, 4096))
    assert shapes[f"{layer}self_attn.k_proj.weight"] == ((1024, 4096), (1024 // 8 // shards, 4096))
    assert shapes[f"{layer}self_attn.o_proj.weight"] == ((4096, 4096), (4096 // shards, 4096 // 8))
    assert shapes[f"{layer}mlp.up_proj.weight"] == ((12288, 4096), (12288 // 8 // shards, 4096))
    assert shapes[f"{layer}mlp.down_proj.weight"] == ((4096, 12288), (4096 // shards, 12288 // 8))
    assert shapes[f"{layer}input_layernorm.weight"] == ((4096,), (4096 // shards,))
    assert shapes["model.embed_tokens.weight"] == ((151936, 4096), (-(-151936 // 8 // shards), 4096))
    assert "lm_head.weight" not in shapes  # tied, once
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in model.parameters())
    assert all(p.device.type == "meta" for p in model.parameters())


def test_parallelize_expected_placements_by_style(join: Any) -> None:
    mesh = join(3, ParallelStrategy(tensor=8))
    model: Any = big_model()

    result = parallelize(model, mesh.tp_mesh, sequence_parallel=True)

    placements = {name: p.placements[0] for name, p in model.named_parameters()}
    for name, placement in placements.items():
        if any(part in name for part in ("o_proj", "down_proj")):
            assert placement == Shard(1), name
        elif "norm" in name:
            assert placement == Replicate(), name
        else:
            assert placement == Shard(0), name
    assert result.vocab_start == 3 * 151936 // 8


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "gemma3"])
def test_scorer_when_512_ranks_expected_one_output_for_each_token_of_this_rank(
    join: Any, arch: str, sequence_parallel: bool
) -> None:
    # The fake group exchanges nothing, so that only shapes mean something.
    mesh = join(300, ParallelStrategy(data=128, context=2, tensor=2))
    config = cases.model_config(arch)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
    options = FSDPConfig(sequence_parallel=sequence_parallel)
    train_config = TrainEngineConfig(path=".", backend="fsdp:d1")
    scorer = build_scorer(model, mesh, train_config, options, is_critic=False)
    batch = cases.ragged_batch()
    part = RowPart(mesh.cp_rank, mesh.cp_size, mesh.cp_size * (2 if sequence_parallel else 1))
    inputs = make_model_input(batch, share_prompts=True, part=part)

    logprobs, entropy = scorer(inputs, True)

    assert logprobs.shape == entropy.shape == inputs.targets.shape
    assert 0 < len(logprobs) < batch["loss_mask"].sum()


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("qwen3_moe", r"'qwen3_moe' needs the style '\w+' .*it has colwise, rowwise"),
        ("gpt_oss", r"no layer of model type 'gpt_oss' matches .*fsdp:dXcZ"),
        ("phi3", r"^backend: .*'phi3' needs the style '\w+' .*qkv_proj, several projections in one.*Use .*fsdp:dXcZ"),
        ("glm", r"^backend: .*'glm' needs the style '\w+' .*gate_up_proj, several projections in one.*Use .*fsdp:dXcZ"),
    ],
)
def test_parallelize_when_a_style_is_not_there_expected_error_that_names_it(join: Any, arch: str, message: str) -> None:
    mesh = join(1, ParallelStrategy(tensor=2))
    config = (
        transformers.Phi3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
        if arch == "phi3"
        else cases.model_config(arch)
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(BadInputError, match=message):
        parallelize(model, mesh.tp_mesh, sequence_parallel=True)


def test_shard_model_when_neither_vocabulary_nor_width_divides_expected_error(join: Any) -> None:
    mesh = join(1, ParallelStrategy(data=3, tensor=2))
    config = cases.model_config("qwen2")  # 61 tokens, width 32
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    train_config = TrainEngineConfig(path=".", backend="fsdp:d1")
    scorer = build_scorer(model, mesh, train_config, FSDPConfig(), is_critic=False)

    with pytest.raises(BadInputError, match=r"t2 does not divide the vocabulary of 61 tokens, nor do the 3 ranks"):
        shard_model(scorer, mesh, torch.float32, FSDPConfig())
