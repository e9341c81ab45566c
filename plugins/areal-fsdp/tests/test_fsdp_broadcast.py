"""Weights by broadcast over a group of their own: what is sent, in which buckets, and what breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_cases as cases
import psutil
import pytest
import torch
import transformers
from broadcast_receiver import BroadcastReceiver
from safetensors.torch import load_file

from areal_core.api.configs import LoRAConfig
from areal_core.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal_core.errors import BadInputError

META = WeightUpdateMeta(type="distributed", chunk_mb=1)


def files_of(engine: Any, folder: Path) -> dict[str, torch.Tensor]:
    engine.save(SaveLoadMeta(path=folder))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_update_weights_when_distributed_expected_every_tensor_of_the_files_once(arch: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder(arch, tmp_path / "model"))
    receiver: Any = BroadcastReceiver(workers=2)
    engine.connect_engine(receiver, META)

    engine.update_weights(META)

    files = files_of(engine, tmp_path / "saved")
    # Tied embeddings are among them under one name.
    assert [name for name, _, _ in receiver.specs] == list(receiver.tensors[0])
    for got in receiver.tensors:
        assert got.keys() == files.keys()
        assert all(torch.equal(got[name], value) for name, value in files.items())
    engine.destroy()


@pytest.mark.parametrize("name", ["http://127.0.0.1:1/prefix/0", "http://localhost/0"])
def test_update_weights_when_receivers_are_named_by_urls_expected_to_reach_them(name: str, tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = BroadcastReceiver()
    receiver.names = (name,)
    engine.connect_engine(receiver, META)

    engine.update_weights(META)

    assert list(receiver.tensors[0]) == [name for name, _, _ in receiver.specs]
    engine.destroy()


def test_update_weights_when_there_is_more_than_a_bucket_expected_several(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=600,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    engine = cases.make_engine(tmp_path / "model")
    receiver: Any = BroadcastReceiver()
    engine.connect_engine(receiver, META)

    engine.update_weights(META)
    engine.update_weights(META)

    sizes = receiver.buckets[0]
    largest = max(torch.Size(shape).numel() * 4 for _, shape, _ in receiver.specs)
    assert len(sizes) > 3
    assert max(sizes) <= (1 << 20) + largest
    assert sum(sizes) == sum(value.numel() * 4 for value in files_of(engine, tmp_path / "saved").values())
    # The group stays from one update to the next.
    assert receiver.joined == 1
    engine.destroy()


def test_update_weights_when_adapters_are_trained_expected_merged(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path / "model")
    engine = cases.make_engine(folder, optimizer=cases.sgd(), lora=LoRAConfig(rank=4))
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    receiver: Any = BroadcastReceiver()
    engine.connect_engine(receiver, META)

    engine.update_weights(META)

    files = files_of(engine, tmp_path / "saved")
    assert receiver.tensors[0].keys() == files.keys()
    for name, value in files.items():
        torch.testing.assert_close(receiver.tensors[0][name], value, rtol=0, atol=0)
    base = load_file(folder / "model.safetensors")
    changed = [name for name in base if not torch.equal(base[name], files[name])]
    assert len(changed) >= 7
    engine.destroy()


def test_update_weights_when_files_split_the_experts_expected_their_layout(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    engine = cases.make_engine(tmp_path / "model")
    receiver: Any = BroadcastReceiver()
    engine.connect_engine(receiver, META)

    engine.update_weights(META)

    files = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in files
    assert receiver.tensors[0].keys() == files.keys()
    assert all(torch.equal(receiver.tensors[0][name], value) for name, value in files.items())
    engine.destroy()


def test_update_weights_when_the_receivers_change_expected_a_new_group(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = BroadcastReceiver(workers=2)
    engine.connect_engine(receiver, META)
    engine.update_weights(META)

    receiver.workers, receiver.names = 1, receiver.names[1:]
    engine.update_weights(META)

    assert receiver.joined == 2
    assert len(receiver.tensors) == 1 and receiver.tensors[0]
    engine.destroy()


def test_update_weights_when_refused_expected_the_reason_and_a_new_try(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = BroadcastReceiver(refuse=BadInputError("another model is served"))
    engine.connect_engine(receiver, META)

    with pytest.raises(BadInputError, match="another model is served"):
        engine.update_weights(META)
    receiver.refuse = None
    engine.update_weights(META)

    assert receiver.tensors[0].keys() == {name for name, _, _ in receiver.specs}
    engine.destroy()


def test_update_weights_when_a_receiver_leaves_expected_an_error(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = BroadcastReceiver(break_after=0)
    engine.connect_engine(receiver, META)

    with pytest.raises(RuntimeError, match=r"the worker is gone|closed|Connection"):
        engine.update_weights(META)

    engine.destroy()


def test_update_weights_when_receivers_are_local_expected_no_port_open_to_others(tmp_path: Path) -> None:
    def listening() -> set[tuple[str, int]]:
        found = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return {(c.laddr.ip, c.laddr.port) for c in found}

    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path / "model"))
    receiver: Any = BroadcastReceiver()
    before = listening()
    engine.connect_engine(receiver, META)

    engine.update_weights(META)

    opened = listening() - before
    assert opened and {address for address, _ in opened} == {"127.0.0.1"}
    engine.destroy()
