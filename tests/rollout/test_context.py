import asyncio
import subprocess
import sys

import pytest
from rollout_fakes import FakeEngine

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.errors import ArealError, BadInputError
from areal_core.rollout.context import EpisodeEngine, request_seed

GCONFIG = GenerationHyperparameters(max_new_tokens=6)


def request(**changes):
    return ModelRequest(input_ids=[1, 2], gconfig=GCONFIG.new(**changes))


def test_seed_when_computed_in_another_process_is_equal():
    program = (
        "import sys; from areal_core.rollout.context import request_seed; "
        "sys.stdout.write(str(request_seed(1, 'train', '0-5', 2, 0, 1)))"
    )

    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert int(other.stdout) == request_seed(1, "train", "0-5", 2, 0, 1)


def test_seed_when_anything_differs_differs():
    base = (1, "train", "0-5", 2, 0, 1)
    others = [
        (2, "train", "0-5", 2, 0, 1),
        (1, "eval", "0-5", 2, 0, 1),
        (1, "train", "1-5", 2, 0, 1),
        (1, "train", "0-5", 3, 0, 1),
        (1, "train", "0-5", 2, 1, 1),
        (1, "train", "0-5", 2, 0, 2),
    ]

    seeds = {request_seed(*key) for key in [base, *others]}

    assert len(seeds) == 7
    assert all(0 <= seed < 2**53 for seed in seeds)


async def test_requests_when_sent_are_seeded_and_tagged_and_the_original_is_left_alone():
    engine, mine = FakeEngine(), request()
    episode = EpisodeEngine(engine, run_seed=3, split="train", uid="0-5", sample=2)

    await episode.agenerate(mine)
    await episode.agenerate(mine)

    assert [r.gconfig.seed for r in engine.requests] == [request_seed(3, "train", "0-5", 2, 0, t) for t in (0, 1)]
    assert [r.rid for r in engine.requests] == ["0-5/2/0/0", "0-5/2/0/1"]
    assert engine.requests[0].metadata == {"episode_id": "0-5/2/0"}
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
