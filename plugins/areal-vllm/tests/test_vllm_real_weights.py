"""Every way of bringing new weights into real vLLM servers, compared with transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_servers import (
    check_against,
    disturb,
    exported,
    make_trainer,
    prompts,
    request,
    save_model,
    send,
    start_engine,
    update_in_flight,
)
from safetensors.torch import load_file, save_file

from areal_core.api.configs import LoRAConfig
from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import ArealError, BadInputError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["vllm:d1", "vllm:t2"])
def engine(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = start_engine(request.param, model, log_dir=tmp_path_factory.mktemp("logs"), max_lora_rank=8)
    yield engine
    engine.destroy()


@pytest.fixture
def base(engine: Any, model: str) -> int:
    """The servers have the weights of ``model`` again, as the version that is returned."""
    version = engine.get_version() + 1
    load(engine, WeightUpdateMeta(type="disk", path=Path(model), version=version))
    return version


def load(engine: Any, meta: WeightUpdateMeta) -> None:
    engine.pause_generation()
    try:
        engine.update_weights_from_disk(meta)
    finally:
        engine.continue_generation()


def greedy(engine: Any, count: int = 4) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(request(ids, greedy=True)) for ids in prompts(count)))

    return asyncio.run(run())


def check_swap(responses: list[Any], models: dict[int, Any]) -> None:
    old, new = sorted(models)
    versions = [set(response.output_versions) for response in responses]
    assert set.union(*versions) == {old, new}
    assert any(len(seen) == 2 for seen in versions), "no request was under way"
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        check_against(models, response)


@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_update_when_requests_run(engine: Any, base: int, model: str, tmp_path: Path, kind: str) -> None:
    trainer = make_trainer(model)
    meta = WeightUpdateMeta(type=kind, path=tmp_path / "update", version=base + 1, chunk_mb=1)
    trainer.connect_engine(engine, meta)
    disturb(trainer, seed=1)
    requests = [request(ids, max_new_tokens=200, ignore_eos=True) for ids in prompts(6)]

    responses = asyncio.run(update_in_flight(engine, trainer, meta, requests))

    new = exported(trainer, tmp_path / "new")
    trainer.destroy()
    check_swap(responses, {base: model, base + 1: new})
    # The same prompts again: nothing of the old weights is left in the prefix cache.
    for response in greedy(engine):
        assert set(response.output_versions) == {base + 1}
        check_against({base + 1: new}, response)


def test_update_when_several_are_sent_over_one_group(engine: Any, base: int, model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    meta = WeightUpdateMeta(type="distributed", chunk_mb=1)
    trainer.connect_engine(engine, meta)

    for step in (1, 2):
        disturb(trainer, seed=step)
        send(engine, trainer, WeightUpdateMeta(type="distributed", version=base + step, chunk_mb=1))

    new = exported(trainer, tmp_path / "new")
    trainer.destroy()
    for response in greedy(engine):
        check_against({base + 2: new}, response)


def test_update_when_it_is_an_adapter(engine: Any, base: int, model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, lora=LoRAConfig(rank=4, alpha=8.0))
    first = WeightUpdateMeta(type="lora", path=tmp_path / "update", version=base + 1)
    trainer.connect_engine(engine, first)
    disturb(trainer, seed=3)
    send(engine, trainer, first)
    old = exported(trainer, tmp_path / "old")
    disturb(trainer, seed=4)
    requests = [request(ids, max_new_tokens=200, ignore_eos=True) for ids in prompts(6)]

    second = WeightUpdateMeta(type="lora", path=tmp_path / "update", version=base + 2)
    responses = asyncio.run(update_in_flight(engine, trainer, second, requests))

    # Exported weights have the adapter merged.
    new = exported(trainer, tmp_path / "new")
    trainer.destroy()
    check_swap(responses, {base + 1: old, base + 2: new})
    for response in greedy(engine):
        check_against({base + 2: new}, response)


def missing_folder(model: str, path: Path) -> str:
    return "there is no such folder"


def wrong_shape(model: str, path: Path) -> str:
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.3.mlp.up_proj.weight"][:-1].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return r"model.layers.3.mlp.up_proj.weight' has shape \[511, 128\], the servers' model needs \[512, 128\]"


def another_model(model: str, path: Path) -> str:
    save_model(path, layers=5)
    return "has no tensor 'model.layers.4"


def half_a_file(model: str, path: Path) -> str:
    shutil.copytree(model, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "not a whole safetensors file"


@pytest.mark.parametrize("make", [missing_folder, wrong_shape, another_model, half_a_file])
def test_update_when_the_folder_is_wrong(engine: Any, base: int, model: str, tmp_path: Path, make: Any) -> None:
    reason = make(model, tmp_path / "wrong")
    before = greedy(engine)

    with pytest.raises(BadInputError, match=reason):
        load(engine, WeightUpdateMeta(type="disk", path=tmp_path / "wrong", version=base + 1))

    after = greedy(engine)
    assert [r.output_tokens for r in after] == [r.output_tokens for r in before]
    for response in after:
        assert set(response.output_versions) == {base}
        check_against({base: model}, response)


def test_update_when_the_server_cannot_see_the_folder(
    engine: Any, base: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on another machine: the path is there for the trainer alone.
    real = engine.fleet.post_all

    def elsewhere(path: str, *, json: Any = None, **options: Any) -> Any:
        if path == "/collective_rpc" and "path" in json["kwargs"]:
            json = {**json, "kwargs": {"path": "/nowhere"}}
        return real(path, json=json, **options)

    monkeypatch.setattr(engine.fleet, "post_all", elsewhere)

    with pytest.raises(BadInputError, match=r"does not see .* as the trainer does"):
        load(engine, WeightUpdateMeta(type="disk", path=Path(model), version=base + 1))

    for response in greedy(engine):
        check_against({base: model}, response)


def test_update_when_the_trainer_has_another_model(engine: Any, base: int, model: str, tmp_path: Path) -> None:
    trainer = make_trainer(save_model(tmp_path / "narrow", hidden=64))
    meta = WeightUpdateMeta(type="distributed", version=base + 1, chunk_mb=1)
    trainer.connect_engine(engine, meta)

    with pytest.raises(BadInputError, match=r"has shape \[160, 64\], the servers' model needs \[160, 128\]"):
        send(engine, trainer, meta)

    trainer.destroy()
    for response in greedy(engine):
        check_against({base: model}, response)


def test_update_when_the_adapter_is_wrong(engine: Any, base: int, model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, lora=LoRAConfig(rank=4, alpha=8.0))
    meta = WeightUpdateMeta(type="lora", path=tmp_path / "update", version=base + 1)
    trainer.connect_engine(engine, meta)
    disturb(trainer, seed=6)
    send(engine, trainer, meta)
    good = exported(trainer, tmp_path / "good")
    trainer.destroy()
    shutil.copytree(tmp_path / "update", tmp_path / "wrong")
    config = json.loads((tmp_path / "wrong" / "adapter_config.json").read_text())
    (tmp_path / "wrong" / "adapter_config.json").write_text(json.dumps({**config, "r": 4096}))

    with pytest.raises(ArealError, match=r"4096|rank"):
        load(engine, WeightUpdateMeta(type="lora", path=tmp_path / "wrong", version=base + 2))

    for response in greedy(engine):
        check_against({base + 1: good}, response)
