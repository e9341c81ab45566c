"""New weights: checked first, swapped between two tokens, versions right."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, WeightUpdateMeta
from areal_core.errors import BadInputError

PROMPT = [3, 1, 4, 1, 5]


def snapshot(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def greedy_continuation(model, tokens, count):
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def generate_with_swap(engine, after, swap, prompt=PROMPT, count=20, copies=1):
    """Greedy generation that is interrupted by ``swap()`` once ``after`` tokens are there."""
    loop = engine._loop
    original = loop._step
    reached, go_on = threading.Event(), threading.Event()
    steps = 0

    def step():
        nonlocal steps
        original()
        steps += 1
        if steps == after:
            reached.set()
            go_on.wait(30)

    loop._step = step

    async def main():
        gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=count)
        engine.pause_generation()
        tasks = [
            asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=list(prompt), gconfig=gconfig)))
            for _ in range(copies)
        ]
        await asyncio.sleep(0)
        engine.continue_generation()
        await asyncio.to_thread(reached.wait, 30)
        pausing = asyncio.ensure_future(asyncio.to_thread(engine.pause_generation))
        # Wait until the pause is asked for, so that no further step runs.
        while not loop._paused:
            await asyncio.sleep(0)
        go_on.set()
        await pausing
        swap()
        engine.continue_generation()
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "bloom"])
def test_swap_when_in_mid_flight_old_model_before_new_model_after(kind, make_model, make_engine, reference_logprobs):
    old, new, used = make_model(kind), make_model(kind, seed=1), make_model(kind)
    engine = make_engine(used)
    engine.set_version(4)

    answers = generate_with_swap(
        engine, 7, lambda: engine.update_weights_from_memory(new.named_parameters(), 5), copies=2
    )

    before = greedy_continuation(old, PROMPT, 7)
    expected = greedy_continuation(new, before, 13)
    logprobs = torch.cat([reference_logprobs(old, before, 5), reference_logprobs(new, expected, 12)])
    assert expected != greedy_continuation(old, PROMPT, 20)
    for answer in answers:
        assert answer.output_tokens == expected[5:]
        assert answer.output_versions == [4] * 7 + [5] * 13
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), logprobs, rtol=0, atol=1e-5)
    assert engine.get_version() == 5


def test_swap_when_keys_are_kept_continues_on_the_old_ones(make_model, make_engine):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(make_model("qwen3"), keep_kv=True)

    (answer,) = generate_with_swap(engine, 7, lambda: engine.update_weights_from_memory(new.named_parameters(), 1))

    # The reference: old keys and values of all but the newest token, then the new model with transformers' cache.
    tokens = greedy_continuation(old, PROMPT, 7)
    with torch.no_grad():
        output = old(torch.tensor([tokens[:-1]]), use_cache=True)
        cache = output.cache if hasattr(output, "cache") else output.past_key_values
        name = "cache" if hasattr(output, "cache") else "past_key_values"
        for _ in range(13):
            output = new(torch.tensor([tokens[-1:]]), use_cache=True, **{name: cache})
            tokens.append(int(output.logits[0, -1].argmax()))
    assert answer.output_tokens == tokens[5:]
    assert answer.output_versions == [0] * 7 + [1] * 13


def test_swap_when_a_new_request_has_the_prompt_of_a_running_one_uses_new_weights(make_model, make_engine, generate):
    new = make_model("qwen3", seed=1)
    engine = make_engine(make_model("qwen3"), keep_kv=True)
    generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=5)

    engine.update_weights_from_memory(new.named_parameters(), 1)
    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)

    assert answer.output_tokens == greedy_continuation(new, PROMPT, 10)[5:]
    assert answer.output_versions == [1] * 10


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_update_when_weights_are_tied_takes_either_name(name, make_model, make_engine, generate):
    engine = make_engine(make_model("qwen3", tie_word_embeddings=True))
    new = make_model("qwen3", seed=1, tie_word_embeddings=True)
    tensors = dict(new.named_parameters())
    tensors[name] = tensors.pop("model.embed_tokens.weight")

    engine.update_weights_from_memory(tensors.items(), 1)

    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy_continuation(new, PROMPT, 10)[5:]


def test_update_when_types_differ_casts(make_model, make_engine):
    model, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(model)

    engine.update_weights_from_memory([(n, p.detach().bfloat16()) for n, p in new.named_parameters()], 1)

    torch.testing.assert_close(
        model.lm_head.weight.detach(), new.lm_head.weight.detach().bfloat16().float(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ["missing", "model.norm.weight"]),
        (lambda t: t.update({"model.nrom.weight": torch.zeros(64)}), ["no weight 'model.nrom.weight'", "norm.weight"]),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 64)}), ["lm_head.weight", "[3, 64]", "[97, 64]"]),
        (lambda t: t.clear(), ["missing", "more"]),
    ],
)
@pytest.mark.parametrize("way", ["memory", "disk"])
def test_update_when_not_valid_names_it_and_keeps_the_old_weights(
    way, change, words, make_model, make_engine, tmp_path
):
    model = make_model("qwen3")
    engine = make_engine(model)
    engine.set_version(3)
    before = snapshot(model)
    tensors = {name: tensor + 1 for name, tensor in snapshot(model).items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")

    def update():
        if way == "memory":
            engine.update_weights_from_memory(tensors.items(), 4)
        else:
            engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path, version=4))

    with pytest.raises(BadInputError) as caught:
        update()

    for word in words:
        assert word in str(caught.value)
    assert engine.get_version() == 3
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("shard", ["10GB", "50KB"])
def test_update_from_disk_when_one_file_or_an_index_takes_the_weights(
    shard, make_model, make_engine, generate, tmp_path
):
    new = make_model("qwen3", seed=1, tie_word_embeddings=True)
    new.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "50KB")
    engine = make_engine(make_model("qwen3", tie_word_embeddings=True))

    engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path, version=7))

    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy_continuation(new, PROMPT, 10)[5:]
    assert answer.output_versions == [7] * 10


@pytest.mark.parametrize("harm", ["absent", "garbage", "cut", "index"])
def test_update_from_disk_when_files_are_broken_names_the_file_and_keeps_the_old(
    harm, make_model, make_engine, tmp_path
):
    model = make_model("qwen3")
    engine = make_engine(model)
    before = snapshot(model)
    file: Path = tmp_path / "model.safetensors"
    if harm == "garbage":
        file.write_bytes(b"no tensors here")
    elif harm == "cut":
        save_file(snapshot(make_model("qwen3", seed=1)), file)
        file.write_bytes(file.read_bytes()[:-100])
    elif harm == "index":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))

    with pytest.raises(BadInputError, match="safetensors"):
        engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path, version=1))

    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_offload_when_requests_wait_goes_on_after_onload(make_model, make_engine, generate):
    model = make_model("qwen3")
    engine = make_engine(model)

    answers = generate_with_swap(engine, 6, lambda: (engine.offload(), engine.onload()))

    assert answers[0].output_tokens == greedy_continuation(model, PROMPT, 20)[5:]


def test_offload_when_the_model_leaves_its_device_keeps_nothing_there(make_model, make_engine, monkeypatch):
    model = make_model("qwen3")
    engine = make_engine(model)
    host = engine._host

    def leave(device):
        for parameter in host.model.parameters():
            parameter.data = parameter.data.clone()

    # Stands for a GPU, whose memory is free when nothing refers to it any more.
    host.device = torch.device("cuda")
    monkeypatch.setattr(host.model, "to", leave)
    engine.offload()

    network = host.loop.decoder.network
    layer, own = network.layers[0], host.model.model.layers[0]
    assert network.embedding.data_ptr() == host.model.model.embed_tokens.weight.data_ptr()
    assert layer.norm_in.weight.data_ptr() == own.input_layernorm.weight.data_ptr()
    assert layer.out.parts[0][1].data_ptr() == own.self_attn.o_proj.weight.data_ptr()
