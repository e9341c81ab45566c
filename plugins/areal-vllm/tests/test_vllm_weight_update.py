"""What the engine says to servers when weights change, and what it refuses before it says anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weight_server import WeightServer

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import WeightUpdateMeta
from areal_core.errors import ArealError, BadInputError
from areal_vllm.config import VLLMConfig
from areal_vllm.engine import VLLMEngine
from areal_vllm.weight_files import check_same, file_shapes
from areal_vllm.weight_update import ADAPTER_NAME

SHAPES = {"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.up_proj.weight": (6, 4)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / name)
    return folder


def write_adapter(folder: Path, rank: int = 2) -> Path:
    write(
        folder, {"layers.0.lora_A.weight": (rank, 4), "layers.0.lora_B.weight": (6, rank)}, "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[VLLMEngine, list[WeightServer]]]]:
    """``start(WeightServer options, ...)``: an engine over such servers, whose model is in ``tmp_path / 'model'``."""
    model = write(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    made: list[Any] = []

    def make(*options: dict[str, Any]) -> tuple[VLLMEngine, list[WeightServer]]:
        servers = [WeightServer(**each) for each in options or ({},)]
        made.extend(servers)
        config = InferenceEngineConfig(
            backend="vllm",
            addresses=[server.address for server in servers],
            setup_timeout=10.0,
            plugin_options={"vllm": VLLMConfig(health_interval=3600.0)},
        )
        engine = VLLMEngine(config)
        made.insert(0, engine)
        engine.initialize(str(model))
        for server in servers:
            server.log.clear()
        return engine, servers

    yield make
    for one in made:
        one.destroy() if isinstance(one, VLLMEngine) else one.close()


def update(engine: VLLMEngine, meta: WeightUpdateMeta) -> None:
    engine.pause_generation()
    try:
        engine.update_weights_from_disk(meta)
        engine.set_version(meta.version)
    finally:
        engine.continue_generation()


def calls(server: WeightServer) -> list[str]:
    """Paths, and the methods of remote calls, without the question whether there is an extension."""
    names = [body["method"] if path == "/collective_rpc" else path for path, _, body in server.log]
    return [name for name in names if name not in ("areal_adapters", "/health")]


def test_disk_when_all_is_well(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, servers = start({}, {"workers": 2})
    folder = write(tmp_path / "update")

    update(engine, WeightUpdateMeta(type="disk", path=folder, version=3))

    for server in servers:
        assert calls(server) == ["/pause", "areal_find_weights", "areal_reload", "/update_weight_version", "/resume"]
        assert server.weights == str(folder)
        assert server.label == "3"
    assert engine.get_version() == 3


def test_disk_when_keys_and_values_are_kept_expected_none_for_new_requests(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    engine, (server,) = start()
    engine.config.weight_update_keep_kv = True

    update(engine, WeightUpdateMeta(type="disk", path=write(tmp_path / "update"), version=1))

    made = calls(server)
    assert made.index("areal_reload") < made.index("/reset_prefix_cache") < made.index("/resume")


def test_disk_when_a_server_has_no_extension(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, servers = start({"extension": False}, {})

    update(engine, WeightUpdateMeta(type="disk", path=write(tmp_path / "update"), version=1))

    assert "reload_weights" in calls(servers[0])
    assert "areal_reload" in calls(servers[1])
    assert [server.label for server in servers] == ["1", "1"]


def no_folder(path: Path) -> str:
    return "there is no such folder"


def no_weights(path: Path) -> str:
    path.mkdir()
    return r"it holds no \*.safetensors"


def other_shape(path: Path) -> str:
    write(path, {**SHAPES, "model.layers.0.mlp.up_proj.weight": (6, 5)})
    return r"'model.layers.0.mlp.up_proj.weight' has shape \[6, 5\], the servers' model needs \[6, 4\]"


def missing(path: Path) -> str:
    write(path, {"model.embed_tokens.weight": (8, 4)})
    return "'model.layers.0.mlp.up_proj.weight' of the servers' model is missing"


def unknown(path: Path) -> str:
    write(path, {**SHAPES, "model.layers.1.mlp.up_proj.weight": (6, 4)})
    return "no tensor 'model.layers.1.mlp.up_proj.weight'"


def cut_off(path: Path) -> str:
    file = write(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return "not a whole safetensors file"


@pytest.mark.parametrize("make", [no_folder, no_weights, other_shape, missing, unknown, cut_off])
def test_disk_when_the_folder_is_wrong(start: Callable[..., Any], tmp_path: Path, make: Callable[[Path], str]) -> None:
    engine, (server,) = start()
    reason = make(tmp_path / "update")

    with pytest.raises(BadInputError, match=reason):
        update(engine, WeightUpdateMeta(type="disk", path=tmp_path / "update", version=1))

    assert calls(server) == ["/pause", "/resume"]
    assert engine.get_version() == 0


def test_disk_when_one_server_does_not_see_the_folder(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, servers = start({}, {"blind": True})

    with pytest.raises(BadInputError, match=rf"{servers[1].address} does not see .*No such file.*distributed"):
        update(engine, WeightUpdateMeta(type="disk", path=write(tmp_path / "update"), version=1))

    assert [server.weights for server in servers] == ["start", "start"]


def test_adapter_when_sent_twice(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, (server,) = start()

    for version in (1, 2):
        folder = write_adapter(tmp_path / f"adapter-{version}")
        update(engine, WeightUpdateMeta(type="lora", path=folder, version=version))

    # The first time under its name; then in place, without that the server would load it at every step.
    assert calls(server).count("/v1/load_lora_adapter") == 1
    (swap,) = [body["kwargs"] for path, _, body in server.log if path == "/collective_rpc" and "swap" in body["method"]]
    assert swap == {"name": ADAPTER_NAME, "number": 7, "path": str(tmp_path / "adapter-2")}
    assert engine.request_model == ADAPTER_NAME
    assert server.label == "2"


def test_adapter_when_another_run_has_left_one(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, (server,) = start()
    server.adapters = {ADAPTER_NAME: 3}

    update(engine, WeightUpdateMeta(type="lora", path=write_adapter(tmp_path / "adapter"), version=1))

    assert "/v1/unload_lora_adapter" in calls(server)
    assert server.adapters == {ADAPTER_NAME: 7}


def test_adapter_when_there_is_no_extension(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, (server,) = start({"extension": False})

    for version in (1, 2):
        folder = write_adapter(tmp_path / f"adapter-{version}")
        update(engine, WeightUpdateMeta(type="lora", path=folder, version=version))

    bodies = [body for path, _, body in server.log if path == "/v1/load_lora_adapter"]
    assert [body.get("load_inplace", False) for body in bodies] == [False, True]


def test_adapter_when_its_rank_changes(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, (server,) = start()
    update(engine, WeightUpdateMeta(type="lora", path=write_adapter(tmp_path / "first"), version=1))
    server.log.clear()

    with pytest.raises(BadInputError, match=r"has shape \[3, 4\], the servers' model needs \[2, 4\]"):
        update(engine, WeightUpdateMeta(type="lora", path=write_adapter(tmp_path / "second", rank=3), version=2))

    assert "areal_swap_adapter" not in calls(server)
    assert engine.get_version() == 1


def test_whole_weights_after_an_adapter_expected_the_model_itself(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, _ = start()
    update(engine, WeightUpdateMeta(type="lora", path=write_adapter(tmp_path / "adapter"), version=1))

    update(engine, WeightUpdateMeta(type="disk", path=write(tmp_path / "update"), version=2))

    assert engine.request_model is None


SPECS = [(name, list(shape), "float32") for name, shape in SHAPES.items()]
INIT = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 9, "world_size": 4}


def test_group_when_servers_have_several_workers(start: Callable[..., Any]) -> None:
    engine, servers = start({"workers": 2}, {})

    names = engine.weight_receivers()
    engine.init_weights_update_group(WeightUpdateMeta(type="distributed", chunk_mb=2, options=INIT))

    assert names == (f"{servers[0].address}/0", f"{servers[0].address}/1", f"{servers[1].address}/0")
    infos = [server.bodies("/init_weight_transfer_engine")[0]["init_info"] for server in servers]
    assert [info["rank_offset"] for info in infos] == [1, 3]
    assert all(info["packed_buffer_size_bytes"] == 2 << 20 and "backend" not in info for info in infos)


def test_group_when_a_server_cannot(start: Callable[..., Any]) -> None:
    engine, _ = start({"broken": ("/init_weight_transfer_engine",)})
    engine.weight_receivers()

    with pytest.raises(ArealError, match=r"(?s)Weight transfer not configured.*--weight-transfer-config .*gloo"):
        engine.init_weights_update_group(WeightUpdateMeta(type="distributed", options=INIT))


def test_distributed_when_all_is_well(start: Callable[..., Any]) -> None:
    engine, (server,) = start()
    seen: list[list[str]] = []

    engine.update_weights_from_distributed(
        WeightUpdateMeta(type="distributed", version=5), SPECS, lambda: seen.append(calls(server))
    )

    # The trainer may begin once all servers have begun.
    assert "/start_weight_update" in seen[0] and "/finish_weight_update" not in seen[0]
    assert calls(server)[-4:] == [
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
    ]
    assert server.bodies("/update_weights")[0]["update_info"] == {
        "names": list(SHAPES),
        "dtype_names": ["float32"] * 2,
        "shapes": [list(shape) for shape in SHAPES.values()],
    }
    assert engine.get_version() == 5


def test_distributed_after_an_adapter_expected_the_model_itself(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, _ = start()
    update(engine, WeightUpdateMeta(type="lora", path=write_adapter(tmp_path / "adapter"), version=1))
    assert engine.request_model is not None

    engine.update_weights_from_distributed(WeightUpdateMeta(type="distributed", version=2), SPECS)

    assert engine.request_model is None


def test_distributed_when_the_tensors_are_others(start: Callable[..., Any]) -> None:
    engine, (server,) = start()
    ready: list[int] = []

    with pytest.raises(BadInputError, match="is missing"):
        engine.update_weights_from_distributed(WeightUpdateMeta(type="distributed"), SPECS[:1], lambda: ready.append(1))

    assert not ready
    assert "/start_weight_update" not in calls(server)


def test_distributed_when_one_server_does_not_begin_expected_the_other_as_before(start: Callable[..., Any]) -> None:
    engine, servers = start({}, {"broken": ("/start_weight_update",)})
    ready: list[int] = []

    with pytest.raises(ArealError, match="not configured"):
        engine.update_weights_from_distributed(WeightUpdateMeta(type="distributed"), SPECS, lambda: ready.append(1))

    assert not ready
    assert not servers[0].active
    assert "/update_weights" not in calls(servers[0])


def test_distributed_when_the_transfer_breaks(start: Callable[..., Any]) -> None:
    engine, _ = start({"broken": ("/update_weights",)})

    with pytest.raises(ArealError, match=r"(?s)answered 500.*broke in the middle"):
        engine.update_weights_from_distributed(WeightUpdateMeta(type="distributed", version=1), SPECS)

    assert engine.get_version() == 0


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00{}trailing"])
def test_file_shapes_when_it_is_no_safetensors(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)

    with pytest.raises(BadInputError, match="not a whole safetensors file"):
        file_shapes(file)


@pytest.mark.parametrize(
    ("new", "tied", "accepted"),
    [
        ({"a": (1,)}, True, True),
        ({"a": (1,), "lm_head.weight": (1,)}, True, True),
        ({"a": (1,), "lm_head.weight": (1,)}, False, False),
        ({"a": (1,), "layers.0.rotary_emb.inv_freq": (3,)}, False, True),
    ],
)
def test_check_same_when_heads_are_tied(new: dict[str, tuple[int, ...]], tied: bool, accepted: bool) -> None:
    if accepted:
        check_same(new, {"a": (1,)}, tied=tied)
    else:
        with pytest.raises(BadInputError, match="lm_head"):
            check_same(new, {"a": (1,)}, tied=tied)
