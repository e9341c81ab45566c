"""A weight update while requests run and wait, in a thread and in a process; weights that are read in place."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import save_file

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, WeightUpdateMeta
from areal_core.errors import BadInputError

LENGTH = 220
#: The first ends long before the others, and says so: then the others are in the middle of theirs.
PROMPTS = [[3, 1, 4, 1, 5]] * 2 + [[7, 7], [9, 1, 2], [8], [3, 1, 4, 1, 5], [2, 4, 6, 8, 10, 12]]


def greedy(model, tokens, count):
    """The next ``count`` tokens, by transformers."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return output[0].tolist()


def assert_greedy(model, tokens, start, cached_by=None):
    """Every token from ``start`` on is the most likely one after those before it.

    With ``cached_by`` the model reads what that other model has stored of the tokens before ``start - 1``.
    """
    if start == len(tokens):
        return
    with torch.no_grad():
        if cached_by is None:
            logits = model(torch.tensor([tokens[:-1]])).logits[0, start - 1 :]
        else:
            output = cached_by(torch.tensor([tokens[: start - 1]]), use_cache=True)
            name = "cache" if hasattr(output, "cache") else "past_key_values"
            cache = {name: getattr(output, name)}
            logits = model(torch.tensor([tokens[start - 1 : -1]]), use_cache=True, **cache).logits[0]
    assert tokens[start:] == logits.argmax(-1).tolist()


def generate_over(engine, update, length=LENGTH):
    """Greedy answers to ``PROMPTS``; ``update`` is called when the first of them is there, in the pause of a step."""

    async def main():
        engine.pause_generation()
        tasks = [
            asyncio.ensure_future(
                engine.agenerate(
                    ModelRequest(
                        input_ids=prompt,
                        gconfig=GenerationHyperparameters(greedy=True, max_new_tokens=length if i else 5),
                    )
                )
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        await asyncio.sleep(0)
        engine.continue_generation()
        await tasks[0]
        engine.pause_generation()
        update()
        engine.continue_generation()
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


def check_versions(answers, before, after):
    """Which are running at the update, which wait; a token of each is there."""
    cuts = [answer.output_versions.count(before) for answer in answers]
    for answer, cut in zip(answers, cuts, strict=True):
        assert answer.output_versions == [before] * cut + [after] * (answer.output_len - cut)
    assert cuts[0] == 5
    # Four rows, one of which the first request has left.
    assert all(5 <= cut < LENGTH for cut in cuts[1:4])
    assert cuts[4] < LENGTH
    assert cuts[5:] == [0, 0]
    return cuts


def test_update_when_requests_run_and_wait_expected_old_tokens_then_new(host_engine, make_model, reference_logprobs):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    host_engine.set_version(6)

    answers = generate_over(host_engine, lambda: host_engine.update_weights_from_memory(new.named_parameters(), 7))

    cuts = check_versions(answers, 6, 7)
    assert host_engine.get_version() == 7
    for prompt, answer, cut in zip(PROMPTS, answers, cuts, strict=True):
        tokens, swap = prompt + answer.output_tokens, len(prompt) + cut
        assert_greedy(old, tokens[:swap], len(prompt))
        assert_greedy(new, tokens, swap)
        logprobs = [reference_logprobs(old, tokens[:swap], len(prompt)), reference_logprobs(new, tokens, swap)]
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), torch.cat(logprobs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_update_when_keys_are_kept_expected_new_model_on_old_keys(process, start, make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = start(keep_kv=True, process=process, max_batch_size=4)

    answers = generate_over(engine, lambda: engine.update_weights_from_memory(new.named_parameters(), 1))

    cuts = check_versions(answers, 0, 1)
    for prompt, answer, cut in zip(PROMPTS, answers, cuts, strict=True):
        tokens, swap = prompt + answer.output_tokens, len(prompt) + cut
        assert_greedy(old, tokens[:swap], len(prompt))
        assert_greedy(old, tokens[:swap], len(prompt))
        # One that waited has no keys of the old model, even with the prompt of one that ran.
        assert_greedy(new, tokens, swap, cached_by=old if cut else None)


@pytest.mark.parametrize("change", ["name", "shape", "missing"])
def test_update_when_not_valid_expected_old_weights_and_a_named_error(host_engine, change, make_model):
    tensors = dict(make_model("qwen3", seed=1).named_parameters())
    if change == "name":
        tensors["model.layers.0.mlp.upp_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    elif change == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    else:
        del tensors["model.norm.weight"]
    host_engine.set_version(2)

    def update():
        with pytest.raises(BadInputError, match="upp_proj" if change == "name" else r"model\.norm\.weight"):
            host_engine.update_weights_from_memory(tensors.items(), 3)

    answers = generate_over(host_engine, update, 20)

    assert answers[-1].output_tokens == greedy(make_model("qwen3"), PROMPTS[-1], 20)[len(PROMPTS[-1]) :]
    assert answers[-1].output_versions == [2] * 20


def test_update_from_disk_expected_new_weights(host_engine, make_model, tmp_path):
    new = make_model("qwen3", seed=2)
    new.save_pretrained(tmp_path / "new")

    host_engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path / "new", version=4))

    answers = generate_over(host_engine, lambda: None, 20)
    assert answers[-1].output_tokens == greedy(new, PROMPTS[-1], 20)[len(PROMPTS[-1]) :]
    assert answers[-1].output_versions == [4] * 20
    with pytest.raises(BadInputError, match="nothing-here"):
        host_engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path / "nothing-here", version=5))
    assert host_engine.get_version() == 4


def test_update_when_types_differ_expected_a_cast(host_engine, make_model):
    new = make_model("qwen3", seed=1).bfloat16()

    host_engine.update_weights_from_memory(new.named_parameters(), 1)

    answers = generate_over(host_engine, lambda: None, 20)
    assert answers[-1].output_tokens == greedy(new.float(), PROMPTS[-1], 20)[len(PROMPTS[-1]) :]


# ------------------------------------------------------------------------------------------------ weights in place


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_update_when_synchronous_expected_the_trainers_memory(start, make_model, generate):
    trained = make_model("qwen3", seed=1)
    engine = start(staleness=0)

    engine.update_weights_from_memory(trained.named_parameters(), 1)

    theirs = addresses(trained)
    copied = [name for name, parameter in engine.model.named_parameters() if parameter.data_ptr() != theirs[name]]
    # Only what a decoder has joined with other tensors.
    assert all(any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) for name in copied)
    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy(trained, [5, 6], 10)[2:]
    # An optimizer step in place, then the next update: nothing is left to copy.
    with torch.no_grad():
        for parameter, other in zip(trained.parameters(), make_model("qwen3", seed=2).parameters(), strict=True):
            parameter.copy_(other)
    engine.update_weights_from_memory(trained.named_parameters(), 2)
    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy(make_model("qwen3", seed=2), [5, 6], 10)[2:]


@pytest.mark.parametrize("options", [{"staleness": 1}, {"staleness": 0, "share_weights": False}])
def test_update_when_not_to_be_shared_expected_a_copy(options, start, make_model, generate):
    trained = make_model("qwen3", seed=1)
    engine = start(**options)
    engine.update_weights_from_memory(trained.named_parameters(), 1)

    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()  # as in the middle of an optimizer step

    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy(make_model("qwen3", seed=1), [5, 6], 10)[2:]


@pytest.mark.parametrize("way", ["disk", "cast", "layout"])
def test_update_after_a_shared_one_expected_never_to_write_into_the_trainers_memory(
    way, start, make_model, generate, tmp_path
):
    trained, new = make_model("qwen3", seed=1), make_model("qwen3", seed=2)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    engine = start(staleness=0)
    engine.update_weights_from_memory(trained.named_parameters(), 1)

    if way == "disk":
        save_file(
            {name: parameter.detach() for name, parameter in new.named_parameters()}, tmp_path / "model.safetensors"
        )
        engine.update_weights_from_disk(WeightUpdateMeta(type="disk", path=tmp_path, version=2))
    elif way == "cast":
        engine.update_weights_from_memory([(n, p.double()) for n, p in new.named_parameters()], 2)
    else:
        columns = [(n, p.t().contiguous().t() if p.dim() == 2 else p) for n, p in new.named_parameters()]
        engine.update_weights_from_memory(columns, 2)

    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy(new, [5, 6], 10)[2:]
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)


def test_update_when_the_model_is_the_callers_expected_to_write_into_it(make_model, make_engine):
    model, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(model)
    before = addresses(model)

    engine.update_weights_from_memory(new.named_parameters(), 1)

    assert addresses(model) == addresses(engine.model) == before
    torch.testing.assert_close(model.lm_head.weight.detach(), new.lm_head.weight.detach(), rtol=0, atol=0)


def test_update_when_tied_expected_both_names_and_one_memory(start, make_model, generate, tmp_path):
    make_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    trained = make_model("qwen3", seed=1, tie_word_embeddings=True)
    engine = start(tmp_path, staleness=0)

    engine.update_weights_from_memory(trained.named_parameters(), 1)

    head, embedding = engine.model.lm_head.weight, engine.model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr() == trained.lm_head.weight.data_ptr()
    (answer,) = generate(engine, [([5, 6], {})], greedy=True, max_new_tokens=10)
    assert answer.output_tokens == greedy(trained, [5, 6], 10)[2:]
