import asyncio
import itertools
import subprocess
import sys

import attrs
import numpy as np
import pytest
import torch
from rollout_fakes import FakeEngine

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.errors import ArealError, BadInputError
from areal_core.rollout.context import EpisodeEngine, _with_seed, group_seed, request_seed

GCONFIG = GenerationHyperparameters(max_new_tokens=6)


def request(**changes):
    return ModelRequest(input_ids=[1, 2], gconfig=GCONFIG.new(**changes))


def test_seed_when_computed_in_another_process_is_equal():
    program = (
        "import sys; from areal_core.rollout.context import group_seed; "
        "sys.stdout.write(str(group_seed(1, 'train', '0-5')))"
    )

    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert int(other.stdout) == group_seed(1, "train", "0-5")


def test_seed_when_anything_differs_differs():
    groups = [
        group_seed(*key) for key in [(1, "train", "0-5"), (2, "train", "0-5"), (1, "eval", "0-5"), (1, "train", "1")]
    ]
    places = list(itertools.product(range(16), range(3), range(16)))

    seeds = {request_seed(group, *place) for group in groups for place in places}

    assert len(set(groups)) == len(groups)
    assert len(seeds) == len(groups) * len(places)
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_seeds_when_of_neighbours_have_bits_as_good_as_coins():
    seeds = [request_seed(7, sample, 0, turn) for sample in range(64) for turn in range(64)]

    ones = np.array([[seed >> bit & 1 for bit in range(53)] for seed in seeds])

    # 4096 throws: five standard deviations are 160.
    assert np.abs(ones.sum(0) - 2048).max() < 160
    neighbours = (ones[1:] != ones[:-1]).sum(1).mean()
    assert abs(neighbours - 26.5) < 0.5


def test_seeding_when_a_request_has_every_option_keeps_the_others():
    full = GenerationHyperparameters(
        max_new_tokens=3,
        min_new_tokens=2,
        max_tokens=9,
        greedy=True,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        stop_token_ids=[5],
        stop=["x"],
        ignore_eos=True,
        frequency_penalty=0.75,
    )
    unset = {name for name, value in attrs.asdict(full).items() if value == getattr(GenerationHyperparameters(), name)}
    assert unset == {"n_samples", "seed"}, "the test names every option"

    copy = _with_seed(full, 11)

    assert copy == full.new(seed=11)
    assert type(copy) is GenerationHyperparameters and full.seed is None
    with pytest.raises(ValueError, match="must be <= 1"):
        copy.top_p = 2.0


async def test_requests_when_sent_are_seeded_and_tagged_and_the_original_is_left_alone():
    engine, mine = FakeEngine(), request()
    row_seed = group_seed(3, "train", "0-5")
    episode = EpisodeEngine(engine, "0-5", sample=2, attempt=1, seed=row_seed)

    await episode.agenerate(mine)
    await episode.agenerate(mine)

    assert [r.gconfig.seed for r in engine.requests] == [request_seed(row_seed, 2, 1, turn) for turn in (0, 1)]
    assert [r.rid for r in engine.requests] == ["0-5/2/1/0", "0-5/2/1/1"]
    assert engine.requests[0].metadata == {"episode_id": "0-5/2/1"}
    assert engine.requests[0].gconfig == GCONFIG.new(seed=engine.requests[0].gconfig.seed)
    assert mine.gconfig.seed is None and mine.metadata == {}
    assert (episode.requests, episode.generated_tokens) == (2, 6)


async def test_requests_when_seed_is_set_keep_it():
    engine = FakeEngine()

    await EpisodeEngine(engine).agenerate(request(seed=11))

    assert engine.requests[0].gconfig.seed == 11


async def test_requests_when_several_samples_are_asked_for_are_bad_input():
    with pytest.raises(BadInputError, match="n_samples=4"):
        await EpisodeEngine(FakeEngine()).agenerate(request(n_samples=4))


class Interrupting(FakeEngine):
    """Gives up after two tokens, and bumps its version, ``times`` times."""

    def __init__(self, times, last="stop"):
        super().__init__()
        self.times, self.last = times, last

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        start = len(request.input_ids)
        response = ModelResponse(
            input_tokens=request.input_ids,
            output_tokens=[start, start + 1],
            output_logprobs=[-0.5, -0.25],
            output_versions=[self.version] * 2,
            stop_reason="interrupt" if self.times else self.last,
        )
        self.times -= 1
        self.version += 1
        return response


async def test_agenerate_when_interrupted_goes_on_from_the_partial_answer():
    engine = Interrupting(1)

    response = await EpisodeEngine(engine).agenerate(request())

    assert response.input_tokens == [1, 2]
    assert response.output_tokens == [2, 3, 4, 5]
    assert response.output_versions == [0, 0, 1, 1]
    assert response.output_logprobs == [-0.5, -0.25] * 2
    assert response.stop_reason == "stop"
    first, second = engine.requests
    assert second.input_ids == [1, 2, 2, 3]
    assert second.gconfig.max_new_tokens == 4
    assert second.gconfig.seed not in (None, first.gconfig.seed)


async def test_agenerate_when_interrupted_at_the_length_limit_ends():
    response = await EpisodeEngine(Interrupting(3)).agenerate(request())

    assert len(response.output_tokens) == 6
    assert response.stop_reason == "length"


async def test_agenerate_when_aborted_fails():
    with pytest.raises(ArealError, match="aborted"):
        await EpisodeEngine(Interrupting(0, last="abort")).agenerate(request())


def test_episode_engine_when_used_as_a_trainer_would_raises():
    episode = EpisodeEngine(FakeEngine())

    assert episode.get_version() == 0
    for call in (episode.destroy, episode.pause_generation, lambda: episode.set_version(1)):
        with pytest.raises(RuntimeError, match="the trainer's to do"):
            call()


async def test_requests_when_concurrent_are_numbered_in_order_of_the_calls():
    engine = FakeEngine()
    episode = EpisodeEngine(engine, uid="u")

    await asyncio.gather(episode.agenerate(request()), episode.agenerate(request()))

    assert [r.rid for r in engine.requests] == ["u/0/0/0", "u/0/0/1"]


@pytest.mark.parametrize("ids", [(1, 2), np.array([1, 2]), [np.int64(1), np.int64(2)], torch.tensor([1, 2])])
async def test_requests_when_ids_are_no_plain_list_send_one(ids):
    engine = FakeEngine()

    response = await EpisodeEngine(engine).agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG))

    (sent,) = engine.requests
    assert type(sent.input_ids) is list and [type(token) for token in sent.input_ids] == [int, int]
    assert sent.input_ids == response.input_tokens == [1, 2]


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (["input_ids", "attention_mask"], "a list of str"),  # list() of what apply_chat_template gives by default
        ({"input_ids": [1]}, "a dict"),
        ("one two", "a str"),
        ([[1, 2]], "a list of list"),
        ([1.0], "a list of float"),
    ],
)
async def test_requests_when_ids_are_none_say_how_to_get_them(ids, what):
    with pytest.raises(BadInputError, match=rf"input_ids is {what}; it must be a list .* return_dict=False"):
        await EpisodeEngine(FakeEngine()).agenerate(ModelRequest(input_ids=ids, gconfig=GCONFIG))
