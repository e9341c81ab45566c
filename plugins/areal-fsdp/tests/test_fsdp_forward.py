"""Log-probs, entropies and values of packed batches against transformers' own forward, one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import fsdp_cases as cases
import pytest
import torch
import transformers
from torch.testing import assert_close

from areal_fsdp.config import FSDPConfig

# The import of an architecture is what takes long.
MORE = ["mistral", "gemma2", "qwen3_moe", "gpt_oss", "granite", "gpt2"]
ARCHS = ["qwen2", "qwen3", "llama", "gemma3", *(pytest.param(arch, marks=pytest.mark.slow) for arch in MORE)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_forward_when_packed_expected_transformers_logprobs(arch: str, share: bool, tmp_path: Path) -> None:
    folder = cases.make_folder(arch, tmp_path)
    batch = cases.ragged_batch()
    engine = cases.make_engine(folder, options=FSDPConfig(share_prompts=share), temperature=0.7)
    with torch.no_grad():
        expected, entropies = cases.reference_logprobs(cases.load_reference(folder), batch, temperature=0.7)

    output = engine.forward(batch, with_entropy=True)

    assert engine.model.config._attn_implementation == "areal_varlen"
    assert expected.abs().max() > 1
    assert_close(output.logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert_close(output.entropy, entropies.float(), rtol=1e-5, atol=1e-5)


def test_forward_when_a_neighbour_changes_expected_bitwise_same_logprobs(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen3", tmp_path), options=FSDPConfig(share_prompts=False))
    batch = cases.make_batch([[6], [6], [6]], prompt=(5, 6))
    changed = batch.tokens["input_ids"].clone()
    changed[11:22] = (changed[11:22] + 7) % cases.VOCAB

    before = engine.forward(batch).logprobs
    after = engine.forward(batch.with_tokens(input_ids=changed)).logprobs

    assert torch.equal(before[:11], after[:11])
    assert torch.equal(before[22:], after[22:])
    assert not torch.equal(before[11:22], after[11:22])


@pytest.mark.parametrize("max_tokens", [1, 25, 60, None])
def test_forward_when_split_expected_tokens_in_place(max_tokens: int | None, tmp_path: Path) -> None:
    folder = cases.make_folder("llama", tmp_path)
    batch = cases.ragged_batch()
    expected = cases.make_engine(folder).forward(batch)

    output = cases.make_engine(folder, max_tokens=max_tokens).forward(batch)

    assert_close(output.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_forward_when_logits_are_chunked_expected_equal(tmp_path: Path) -> None:
    folder = cases.make_folder("gemma3", tmp_path)
    batch = cases.ragged_batch()
    expected = cases.make_engine(folder).forward(batch, with_entropy=True)

    output = cases.make_engine(folder, options=FSDPConfig(logits_chunk_tokens=7)).forward(batch, with_entropy=True)

    assert_close(output.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    assert_close(output.entropy, expected.entropy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", [pytest.param("mamba", marks=pytest.mark.slow), "qwen3"])
def test_forward_when_attention_cannot_be_packed_expected_padded_equal(arch: str, tmp_path: Path) -> None:
    folder = cases.make_folder(arch, tmp_path)
    batch = cases.ragged_batch()
    engine = cases.make_engine(folder, attn_impl="auto" if arch == "mamba" else "sdpa")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        expected, _ = cases.reference_logprobs(reference, batch)

    output = engine.forward(batch)

    assert not engine.ready().is_packed
    assert_close(output.logprobs, expected.float(), rtol=1e-4, atol=1e-4)


def test_forward_when_batch_is_empty_expected_empty(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path))

    output = engine.forward(cases.ragged_batch().select([]), with_entropy=True)

    assert output.logprobs.shape == (0,)
    assert output.entropy is not None and output.entropy.shape == (0,)


def test_forward_when_nothing_is_trained_expected_zeros(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_folder("qwen2", tmp_path))
    batch = cases.ragged_batch()

    output = engine.forward(batch.with_tokens(loss_mask=torch.zeros_like(batch["loss_mask"])))

    assert torch.equal(output.logprobs, torch.zeros(batch.num_tokens))


def test_forward_when_first_token_is_trained_expected_zero_there(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen2", tmp_path)
    batch = cases.ragged_batch()
    batch = batch.with_tokens(loss_mask=torch.ones_like(batch["loss_mask"]))
    engine = cases.make_engine(folder)
    with torch.no_grad():
        expected, _ = cases.reference_logprobs(cases.load_reference(folder), batch)

    output = engine.forward(batch)

    assert_close(output.logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(output.logprobs[batch.cu_seqlens[:-1].long()], torch.zeros(batch.num_seqs))


def test_forward_when_critic_expected_value_of_state_before_token(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.ragged_batch()
    engine = cases.make_engine(folder, role="critic")
    reference = cases.load_reference(folder)
    head = engine.model.score.weight.detach().double()

    output = engine.forward(batch)

    assert output.values is not None
    with torch.no_grad():
        for ids, mask, values in zip(
            batch.sequences("input_ids"),
            batch.sequences("loss_mask"),
            output.values.split(batch.seqlens.tolist()),
            strict=True,
        ):
            states = reference.model(input_ids=ids[None]).last_hidden_state[0] @ head[0]
            assert_close(values[1:], (states[:-1] * mask[1:]).float(), rtol=1e-5, atol=1e-5)
            assert values[0] == 0


@pytest.mark.parametrize(("dtype", "param_dtype"), [("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_forward_when_bfloat16_expected_near_float32(dtype: str, param_dtype: str, tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.ragged_batch()
    expected = cases.make_engine(folder).forward(batch).logprobs

    output = cases.make_engine(folder, dtype=dtype, param_dtype=param_dtype).forward(batch).logprobs

    assert output.dtype == torch.float32
    assert 1e-4 < (output - expected).abs().max() < 0.5
    assert (output - expected).abs().mean() < 0.05


def test_logits_when_there_is_a_temperature_expected_those_of_transformers_divided_by_it(tmp_path: Path) -> None:
    folder = cases.make_folder("qwen3", tmp_path)
    batch = cases.ragged_batch()
    reference = cases.load_reference(folder)
    with torch.no_grad():
        sequences = batch.sequences("input_ids")
        before = [reference(input_ids=ids[None], use_cache=False).logits[0, :-1] / 1.7 for ids in sequences]
    expected = torch.cat([torch.cat([logits.new_zeros(1, cases.VOCAB), logits]) for logits in before])
    engine = cases.make_engine(folder, temperature=1.7, max_tokens=40)
    mask = batch["loss_mask"]

    logits = engine.logits(engine.hidden_states(batch)[mask])

    assert_close(logits, expected[mask].float(), rtol=1e-4, atol=1e-4)
