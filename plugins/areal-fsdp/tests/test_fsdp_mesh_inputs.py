"""Meshes that cannot be: one error each, before any weight is read; and which rows a rank gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch

from areal_core.api.alloc import ParallelStrategy, parse_backend
from areal_core.api.configs import LoRAConfig, OptimizerConfig, TrainEngineConfig
from areal_core.errors import BadInputError
from areal_fsdp.config import FSDPConfig
from areal_fsdp.layout import RowPart, make_model_input
from areal_fsdp.mesh import Mesh, check_strategy
from areal_fsdp.parallel import check_parallel
from areal_fsdp.tensor_parallel import check_heads


@pytest.mark.parametrize(
    ("backend", "replicate", "message"),
    [
        ("fsdp:p2", 1, r"actor\.backend: .*p2.*no pipeline parallelism.* Use fsdp:d2, on as many"),
        ("fsdp:d2p2t2", 1, r"actor\.backend: .*p2.*no pipeline parallelism.* Use fsdp:d4t2, on as many"),
        ("fsdp:e2", 1, r"actor\.backend: .*e2.*no expert parallelism.* Use fsdp:d1, on as many"),
        ("fsdp:d2e2", 1, r"actor\.backend: .*e2.*no expert parallelism.* Use fsdp:d2, on as many"),
        ("fsdp:d4et2", 1, r"actor\.backend: .*et2.*no expert parallelism.* Use fsdp:d4, on as many"),
        ("fsdp:d6", 4, r"fsdp\.replicate: 4 does not divide the 6 .* Use one of 1, 2, 3, 6"),
    ],
)
def test_check_strategy_when_not_there_expected_error(backend: str, replicate: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        check_strategy(parse_backend(backend).parallel, replicate, key="actor.backend")


@pytest.mark.parametrize(
    ("world", "message"), [(6, "6 processes are not a multiple of t[*]c[*]p = 4"), (8, "Use d2t2c2 for 8 processes")]
)
def test_world_size_when_sizes_do_not_multiply_to_it_expected_error_with_what_would(world: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        ParallelStrategy(data=4, tensor=2, context=2).check_world_size(world)


@pytest.mark.parametrize(
    ("tensor", "context", "message"),
    [
        (3, 1, "t3 cannot split num_attention_heads = 4 of model type 'qwen3' evenly. Use t = 1 or 2"),
        (4, 1, "t4 cannot split num_key_value_heads = 2 of model type 'qwen3'"),
        (1, 3, "c3 cannot split the 4 attention heads .* Use c = 1 or 2"),
        (2, 4, "c4 cannot split the 2 attention heads .* t = 2.* Use c = 1 or 2"),
    ],
)
def test_check_heads_when_not_divisible_expected_error_with_what_would(tensor: int, context: int, message: str) -> None:
    with pytest.raises(BadInputError, match=rf"ref\.backend: {message}"):
        check_heads(cases.model_config("qwen3"), tensor=tensor, context=context, key="ref.backend")


def test_check_heads_when_there_are_none_expected_error_with_what_would() -> None:
    with pytest.raises(BadInputError, match=r"'mamba' has no attention heads to split. Use fsdp:dN"):
        check_heads(cases.model_config("mamba"), tensor=2, context=1)


@pytest.mark.parametrize("arch", ["gpt2", "opt"])
def test_check_heads_when_no_plan_expected_error_naming_the_model_type(arch: str) -> None:
    with pytest.raises(BadInputError, match=rf"t2 needs a tensor-parallel plan.*'{arch}'.*fsdp:dXcZ"):
        check_heads(cases.model_config(arch), tensor=2, context=1)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_check_heads_when_divisible_expected_nothing(sizes: tuple[int, int]) -> None:
    # c4 with 2 key and value heads: they are repeated.
    check_heads(cases.model_config("qwen3"), tensor=sizes[0], context=sizes[1])


@pytest.mark.parametrize(
    ("mesh", "options", "fields", "message"),
    [
        ({"cp_size": 2}, {}, {"attn_impl": "sdpa"}, r"actor\.backend: c2 needs packed attention.*attn_impl=sdpa"),
        ({"tp_size": 2}, {}, {"attn_impl": "sdpa"}, r"actor\.fsdp\.sequence_parallel: needs packed attention"),
        ({"tp_size": 2}, {"disable_dropout": False}, {}, r"actor\.fsdp\.disable_dropout: must be true"),
        ({"tp_size": 2}, {}, {"lora": LoRAConfig(dropout=0.1)}, r"actor\.lora\.dropout: must be 0"),
        ({}, {"wrap_layers": ["Qwen3DecoderLayr"]}, {}, r"wrap_layers: .*Did you mean 'Qwen3DecoderLayer'"),
    ],
    ids=str,
)
def test_check_parallel_when_options_do_not_fit_expected_error(
    mesh: dict[str, int], options: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = cases.make_engine(cases.make_folder("qwen3", tmp_path), attn_impl=fields.get("attn_impl", "auto")).model
    config = TrainEngineConfig(path=str(tmp_path), backend="fsdp:d1", **fields)

    with pytest.raises(BadInputError, match=message):
        check_parallel(model, Mesh(device=torch.device("cpu"), **mesh), config, FSDPConfig(**options))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_impl": "spda"}, r"critic\.attn_impl: there is no attention 'spda'; known are auto, eager, .*'sdpa'"),
        ({"optimizer": OptimizerConfig(momentum=0.9)}, r"critic\.optimizer\.momentum: is an option of sgd and muon"),
        (
            {"optimizer": cases.sgd(state_dtype="bfloat16")},
            r"critic\.optimizer\.state_dtype: is an option of .*adamw",
        ),
        ({"optimizer": OptimizerConfig(rounding="kahan")}, r"critic\.optimizer\.rounding: kahan compensates bfloat16"),
        ({"lora": LoRAConfig(target_modules=["foo"])}, r"critic\.lora\.target_modules: peft cannot use \['foo'\]"),
    ],
    ids=str,
)
def test_initialize_when_options_do_not_fit_expected_error_with_the_whole_key(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = cases.make_folder("qwen3", tmp_path)

    with pytest.raises(BadInputError, match=f"^{message}"):
        cases.make_engine(folder, role="critic", **fields)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("parts", "multiple"), [(1, 4), (2, 2), (2, 8), (4, 16)])
def test_make_model_input_when_split_over_ranks_expected_every_token_predicted_once(
    parts: int, multiple: int, share: bool
) -> None:
    batch = cases.ragged_batch()
    whole = make_model_input(batch, share_prompts=share)

    pieces = [
        make_model_input(batch, share_prompts=share, part=RowPart(index, parts, multiple)) for index in range(parts)
    ]

    size = len(pieces[0].input_ids)
    assert size * parts % multiple == 0
    assert 0 <= size * parts - whole.num_rows < multiple
    ids = torch.cat([piece.input_ids for piece in pieces])
    positions = torch.cat([piece.position_ids for piece in pieces])
    assert torch.equal(ids[: whole.num_rows], whole.input_ids)
    assert torch.equal(positions[: whole.num_rows], whole.position_ids)
    rows = torch.cat([piece.rows + index * size for index, piece in enumerate(pieces)])
    tokens = torch.cat([piece.token_index for piece in pieces])
    order = tokens.argsort()
    assert torch.equal(tokens[order], whole.token_index)
    assert torch.equal(rows[order], whole.rows)
    assert torch.equal(torch.cat([piece.targets for piece in pieces])[order], whole.targets)
    # A token at a border is predicted by the rank before the one that has it.
    crossing = [i for i, piece in enumerate(pieces[:-1]) if (piece.rows == size - 1).any()]
    assert crossing or parts == 1


@pytest.mark.parametrize("part", [RowPart(0, 2, 4), RowPart(1, 2, 4)])
def test_make_model_input_when_empty_expected_dummy_rows_on_every_rank(part: RowPart) -> None:
    inputs = make_model_input(cases.ragged_batch().select([]), share_prompts=True, part=part)

    assert inputs.is_dummy
    assert inputs.input_ids.shape == inputs.position_ids.shape == (2,)
    assert len(inputs.plan.out_rows) == 4
    assert len(inputs.rows) == 0
