"""Two hundred ragged prompts against transformers.generate."""

from __future__ import annotations

import random

import pytest
import torch

from areal_local.decoder import ModuleNetwork, RowwiseDecoder
from areal_local.llama import LlamaNetwork

VOCAB = 97
#: Two logits that are closer than this are in the order that rounding gives them.
TIE = 1e-4


def reference(model, prompt, count):
    """(greedy tokens, gap between the two largest logits at each) of transformers.generate."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([logits[0].topk(2).values for logits in output.logits])
    return output.sequences[0, len(prompt) :].tolist(), best[:, 0] - best[:, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("qwen2", LlamaNetwork),
        ("qwen3", LlamaNetwork),
        ("llama", LlamaNetwork),
        ("gemma3", ModuleNetwork),
        ("bloom", RowwiseDecoder),
    ],
)
def test_greedy_when_40_ragged_prompts_of_each_of_five_families_equals_transformers(
    kind, way, make_model, make_engine, generate, reference_logprobs
):
    model = make_model(kind)
    rng = random.Random(kind)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 120))] for _ in range(40)]
    counts = [rng.randint(1, 24) for _ in prompts]
    engine = make_engine(model, max_batch_size=16)

    answers = generate(engine, [(p, {"max_new_tokens": n}) for p, n in zip(prompts, counts, strict=True)], greedy=True)

    decoder = engine._loop.decoder
    assert isinstance(getattr(decoder, "network", decoder), way)
    ties = 0
    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        expected, gaps = reference(model, prompt, count)
        first_tie = int((gaps < TIE).nonzero()[0]) if bool((gaps < TIE).any()) else count
        ties += first_tie < count
        assert answer.output_tokens[:first_tie] == expected[:first_tie]
        logprobs = reference_logprobs(model, prompt + answer.output_tokens, len(prompt))
        torch.testing.assert_close(torch.tensor(answer.output_logprobs), logprobs, rtol=0, atol=1e-5)
    assert ties <= 1
