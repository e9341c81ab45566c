"""What a token may cost: waits for the device, memory, threads, and products of matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_local.attention import split_rows
from areal_local.host import default_threads
from areal_local.llama import LlamaNetwork, Projection, pack_weights

PROMPT = [3, 1, 4, 1, 5]


class SyncCounter(TorchDispatchMode):
    """Counts the operations that wait for a device: a scalar read, a copy to the host, a result of unknown size."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in str(func) for name in self.WAITING)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("without_kernels")  # as on another device
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"greedy": True},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
        {"frequency_penalty": 0.5, "min_new_tokens": 5, "stop_token_ids": [11]},
    ],
    ids=["temperature", "greedy", "filters", "penalties"],
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_decode_step_when_rows_run_waits_for_the_device_once(
    kind, options, make_model, make_engine, generate, monkeypatch
):
    engine = make_engine(make_model(kind))
    loop, waits = engine._loop, []
    copies = {"cpu": 0, "tolist": 0}
    for name in copies:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, name=name, original=original):
            copies[name] += 1
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    original_step = loop._step

    def step():
        before, prefilled = sum(copies.values()), loop.counters["prefill_tokens"]
        with SyncCounter() as counter:
            original_step()
        if loop.counters["prefill_tokens"] == prefilled:
            waits.append(counter.count + sum(copies.values()) - before)

    loop._step = step

    generate(engine, [([i, i + 1], {"seed": i, "max_new_tokens": 4 + i}) for i in range(8)], **options)

    assert len(waits) > 5
    assert set(waits) == {1}


def test_rows_when_one_ends_are_taken_by_a_waiting_request_at_once(model, make_engine, generate):
    engine = make_engine(model, max_batch_size=2)

    generate(engine, [([n], {"max_new_tokens": tokens}) for n, tokens in enumerate((2, 12, 10))])

    # The counters of a step are complete once its thread waits again.
    engine.pause_generation()
    stats = engine.export_stats()
    # One step ends the first. The third is read, and the ten steps that the second still needs are enough for it.
    assert (stats["generated_tokens"], stats["decode_steps"]) == (24, 1 + 10)


def test_cache_when_requests_come_in_waves_reuses_its_slots(model, make_engine, generate):
    engine = make_engine(model, max_batch_size=4)
    jobs = [([i] * (1 + 5 * (i % 5)), {"max_new_tokens": 3 + i % 9}) for i in range(40)]
    generate(engine, jobs, greedy=True)
    cache = engine._loop.decoder.cache
    first = {layer: (keys.data_ptr(), keys.shape) for layer, (keys, _) in cache.layers.items()}

    generate(engine, jobs, greedy=True)

    assert cache.rows == 4
    assert cache.capacity <= 64
    assert {layer: (keys.data_ptr(), keys.shape) for layer, (keys, _) in cache.layers.items()} == first


@pytest.mark.parametrize("cost", [0, 50, 10**9])
def test_split_rows_when_rows_are_ragged_covers_each_once_and_never_costs_more(cost):
    lengths = np.random.default_rng(0).integers(1, 500, 70)

    runs = split_rows(lengths, cost)

    assert [row for start, stop in runs for row in range(start, stop)] == list(range(70))
    padded = sum((stop - start) * int(lengths[start:stop].max()) for start, stop in runs)
    assert padded + (len(runs) - 1) * cost <= 70 * int(lengths.max())
    assert (len(runs) == 1) == (cost == 10**9)


def test_split_rows_when_two_lengths_are_sorted_cuts_between_them():
    assert split_rows(np.array([300] * 5 + [20] * 9), 100) == [(0, 5), (5, 14)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_fast_network_when_weights_are_packed_gives_the_same_tokens_from_fewer_products(
    kind, make_model, make_engine, generate
):
    jobs = [(PROMPT[: 1 + i], {"max_new_tokens": 12}) for i in range(5)]
    packed = make_model(kind)
    pack_weights(packed)
    engines = [make_engine(make_model(kind)), make_engine(packed)]

    apart, together = (generate(engine, jobs, greedy=True) for engine in engines)

    networks = [engine._loop.decoder.network for engine in engines]
    assert all(isinstance(network, LlamaNetwork) for network in networks)
    assert [len(network.layers[0].qkv.parts) for network in networks] == [3, 1]
    assert [len(network.layers[0].gate_up.parts) for network in networks] == [2, 1]
    assert [answer.output_tokens for answer in apart] == [answer.output_tokens for answer in together]


def test_pack_weights_when_done_leaves_names_values_and_gradients_alone(make_model):
    model, packed = make_model("qwen2"), make_model("qwen2")

    pack_weights(packed)

    assert [name for name, _ in packed.named_parameters()] == [name for name, _ in model.named_parameters()]
    for old, new in zip(model.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
        assert new.is_leaf
        assert new.requires_grad == old.requires_grad


def test_fast_network_when_a_parameter_moves_reads_it_where_it_is(make_model, make_engine, generate):
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    pack_weights(model)
    engine = make_engine(model)
    before = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)[0].output_tokens

    with engine._loop.exclusive():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.data = new.data
        engine._loop.weights_changed(keep_kv=False)
    after = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)[0].output_tokens

    expected = generate(make_engine(other), [(PROMPT, {})], greedy=True, max_new_tokens=10)[0].output_tokens
    assert after == expected
    assert after != before


def test_projection_when_layers_do_not_touch_computes_each():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, width) for width in (4, 6)]
    hidden, out = torch.randn(3, 8), torch.empty(3, 10)

    with torch.no_grad():
        Projection(layers).into(out, hidden)

    torch.testing.assert_close(out, torch.cat([layer(hidden) for layer in layers], 1), rtol=0, atol=1e-6)


def test_threads_when_the_model_is_small_are_one_and_others_keep_theirs(model, make_engine, generate):
    before = torch.get_num_threads()
    seen = []
    engine = make_engine(model)
    original = engine._loop._step
    engine._loop._step = lambda: (seen.append(torch.get_num_threads()), original())

    generate(engine, [(PROMPT, {})], max_new_tokens=2)

    assert set(seen) == {1}
    assert torch.get_num_threads() == before
    big = torch.nn.Linear(4000, 4000, device="meta")
    assert default_threads(big, torch.device("cpu")) is None
    assert default_threads(model, torch.device("cuda")) is None
