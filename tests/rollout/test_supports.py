"""Supports on their way from a response to a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agent_fakes import END, ScriptedEngine, message_of, user
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import FakeEngine
from tiny_tokenizer import TOOLS, tiny_tokenizer

from areal_core.api.configs import AgentConfig, InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, Trajectory
from areal_core.api.supports import MAX_SUPPORT, from_ragged, from_rows, join, to_ragged
from areal_core.data.comm import scatter_batches
from areal_core.data.packing import pack_trajectories
from areal_core.errors import ArealError
from areal_core.rollout.agents.completions import Completion
from areal_core.rollout.agents.export import export_concat
from areal_core.rollout.agents.workflow import AgentRunner
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.results import WorkflowResultError, as_trajectories

TRUNCATED = GenerationHyperparameters(top_k=5, top_p=0.9)


def matrix(*rows: list[int]) -> np.ndarray:
    return from_rows([np.array(row, np.int32) for row in rows])


def response(prompt: list[int], output: list[int], supports: np.ndarray | None = None) -> ModelResponse:
    return ModelResponse(
        input_tokens=prompt,
        output_tokens=output,
        output_logprobs=[-0.5] * len(output),
        output_versions=[2] * len(output),
        output_supports=supports,
    )


@given(st.lists(st.lists(st.integers(0, 999), max_size=7), max_size=9))
def test_supports_when_made_ragged_and_back_are_the_same(rows: list[list[int]]) -> None:
    supports = matrix(*rows)

    counts, ids = to_ragged(supports)

    assert supports.dtype == np.int32 and supports.shape == (len(rows), max(1, *map(len, rows), 1))
    assert counts.tolist() == [len(row) for row in rows] and ids.tolist() == [i for row in rows for i in row]
    np.testing.assert_array_equal(from_ragged(counts, ids), supports)


def test_join_when_parts_differ_in_width_fills_up() -> None:
    joined = join([(None, 1), (matrix([4, 7], [9]), 2), (None, 0), (matrix([1, 2, 3]), 1)])

    assert joined is not None and joined.tolist() == [[-1] * 3, [4, 7, -1], [9, -1, -1], [1, 2, 3]]
    assert join([(None, 3), (None, 2)]) is None
    with pytest.raises(ValueError, match="2 rows for 3 tokens"):
        join([(matrix([1], [2]), 3)])


def test_trajectory_when_turns_have_supports_has_none_for_what_others_said() -> None:
    first = response([1, 2], [3, 4], matrix([3, 5], [4]))
    second = response([1, 2, 3, 4, 8], [6], matrix([5, 6, 7]))

    single, both = Trajectory.from_response(first, 1.0), Trajectory.from_turns([first, second], 1.0)

    none = [-1, -1, -1]
    assert single.supports is not None and single.supports.tolist() == [[-1, -1], [-1, -1], [3, 5], [4, -1]]
    assert both.supports is not None
    assert both.supports.tolist() == [none, none, [3, 5, -1], [4, -1, -1], none, [5, 6, 7]]
    slow = Trajectory.from_turns([first], 1.0).supports
    assert slow is not None
    np.testing.assert_array_equal(single.supports, slow)
    assert Trajectory.from_response(response([1], [2]), 1.0).supports is None


def test_batch_when_some_trajectories_have_supports_says_minus_one_for_the_others() -> None:
    with_them = Trajectory.from_response(response([1], [3, 4], matrix([3, 5], [4])), 1.0)
    without = Trajectory.from_response(response([1], [2]), 1.0)

    batch = pack_trajectories([without, with_them])

    assert batch["supports"].dtype == torch.int32
    assert batch["supports"].tolist() == [[-1, -1]] * 3 + [[3, 5], [4, -1]]
    assert batch.select([1])["supports"].tolist() == [[-1, -1], [3, 5], [4, -1]]
    assert scatter_batches([batch]) is batch
    assert "supports" not in batch.without("supports") and "logprobs" in batch.without("supports")
    assert "supports" not in pack_trajectories([without])


def test_export_when_a_branch_is_trained_elsewhere_has_no_supports_there() -> None:
    def completion(order: int, parent: Completion | None, *parts: Any) -> Completion:
        made = Completion(
            id=str(order),
            request_id=str(order),
            order=order,
            index=0,
            n=1,
            messages=[],
            message={},
            tool_calls=[],
            finish_reason="stop",
            response=response(*parts),
            parent=parent,
            reward=1.0,
        )
        if parent is not None:
            parent.children.append(made)
        return made

    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return " ".join(map(str, ids))

    root = completion(0, None, [1], [3], matrix([3, 5]))
    left = completion(1, root, [1, 3, 8], [4], matrix([4]))
    right = completion(2, root, [1, 3, 9], [6], matrix([6, 7]))

    first, second = export_concat([root, left, right], 1.0, Tokenizer())

    assert first.supports is not None and first.supports.tolist() == [[-1, -1], [3, 5], [-1, -1], [4, -1]]
    assert second.supports is not None and second.supports.tolist() == [[-1, -1]] * 3 + [[6, 7]]


# ------------------------------------------------------------------------------------------ what workflows return


def as_dict(**changes: Any) -> dict[str, Any]:
    plain = {
        "input_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -1.0, -1.0],
        "versions": [-1, 0, 0],
        "reward": 1.0,
    }
    return {**plain, **changes}


def test_results_when_a_dict_has_supports_are_taken_as_lists_and_tensors() -> None:
    supports = [[-1, -1], [2, 9], [-1, -1]]

    (listed,) = as_trajectories(as_dict(supports=supports), "mine")
    (padded,) = as_trajectories(
        as_dict(supports=torch.tensor([supports]), attention_mask=[0, 1, 1], loss_mask=[0, 0, 1]), "mine"
    )

    assert listed.supports is not None and listed.supports.tolist() == supports
    assert padded.supports is not None and padded.supports.tolist() == supports[1:]


@pytest.mark.parametrize(
    ("supports", "words"),
    [
        ([[-1], [2], [9]], r"mine.*supports\[2\].*token 3"),
        ([-1, 2, 3], r"supports has shape \[3\].*\[L, K\]"),
        ([[-1], [2]], "supports has 2 entries, but input_ids has 3"),
        ([[0.5], [2.0], [3.0]], "supports holds float64"),
    ],
)
def test_results_when_supports_are_wrong_say_where(supports: Any, words: str) -> None:
    with pytest.raises(WorkflowResultError, match=words):
        as_trajectories(as_dict(supports=supports), "mine")


def test_results_when_a_trajectory_misses_its_own_token_say_where() -> None:
    made = Trajectory.from_response(response([1], [3, 4], matrix([3, 5], [9])), 1.0)

    with pytest.raises(WorkflowResultError, match=r"supports\[2\].*token 4"):
        as_trajectories(made, "mine")
    with pytest.raises(ValueError, match=r"Trajectory.supports has shape \(2, 1\).*\[3, K\]"):
        Trajectory(input_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0] * 3, versions=[0] * 3, supports=[[1], [2]])


# ------------------------------------------------------------------------------------------- who is asked for them


@pytest.mark.parametrize(
    ("gconfig", "asked"),
    [
        (TRUNCATED, True),
        (TRUNCATED.new(top_k=MAX_SUPPORT), True),
        (TRUNCATED.new(top_k=0), False),
        (TRUNCATED.new(top_k=MAX_SUPPORT + 1), False),
        (TRUNCATED.new(greedy=True), False),
        (GenerationHyperparameters(), False),
    ],
)
async def test_request_when_it_truncates_within_the_bound_asks_for_supports(
    gconfig: GenerationHyperparameters, asked: bool
) -> None:
    engine = FakeEngine()

    await EpisodeEngine(engine, with_supports=True).agenerate(ModelRequest(input_ids=[1], gconfig=gconfig))
    await EpisodeEngine(engine).agenerate(ModelRequest(input_ids=[1], gconfig=gconfig))

    assert [request.return_supports for request in engine.requests] == [asked, False]


async def test_request_when_interrupted_joins_the_supports_of_its_parts() -> None:
    class Interrupting(FakeEngine):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            self.requests.append(request)
            last = len(self.requests) == 2
            made = response(request.input_ids, [5, 6], matrix([5], [6, 7]) if not last else matrix([1, 2, 5], [6]))
            made.stop_reason = "stop" if last else "interrupt"
            return made

    engine = Interrupting()

    made = await EpisodeEngine(engine, with_supports=True).agenerate(ModelRequest(input_ids=[1], gconfig=TRUNCATED))

    assert [request.return_supports for request in engine.requests] == [True, True]
    assert made.output_supports is not None
    assert made.output_supports.tolist() == [[5, -1, -1], [6, 7, -1], [1, 2, 5], [6, -1, -1]]


@pytest.mark.parametrize("returns", [True, False])
def test_controller_when_the_engine_returns_supports_asks_in_training_alone(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Workflow:
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
            made = await engine.agenerate(ModelRequest(input_ids=[1], gconfig=TRUNCATED))
            return Trajectory.from_response(made, 1.0)

    monkeypatch.setattr(FakeEngine, "returns_supports", returns)
    engine = FakeEngine()
    controller = RolloutController(engine, Workflow(), InferenceEngineConfig(), batch_size=1, with_supports=True)
    controller.start()
    try:
        controller.evaluate([{"n": 1}])
        controller.rollout_batch([{"n": 1}])
    finally:
        controller.stop()

    assert [request.return_supports for request in engine.requests] == [False, returns]


class Truncating(FakeEngine):
    returns_supports = True

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return response([1], [2, 3], matrix([2, 5], [3]) if request.return_supports else None)


@pytest.mark.parametrize(("helper", "refused"), [(None, True), (GenerationHyperparameters(), False)])
def test_controller_when_a_workflow_leaves_the_supports_out(
    helper: GenerationHyperparameters | None, refused: bool
) -> None:
    class Workflow:
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            await engine.agenerate(ModelRequest(input_ids=[1], gconfig=TRUNCATED))
            if helper is not None:
                # Then the tokens may be those of this one, which has no supports.
                await engine.agenerate(ModelRequest(input_ids=[1], gconfig=helper))
            return as_dict()

    with RolloutController(
        Truncating(), Workflow(), InferenceEngineConfig(), batch_size=1, with_supports=True
    ) as controller:
        if refused:
            # Its log-probs are over the supports, and would be compared with those over the whole vocabulary.
            with pytest.raises(ArealError, match=r"'Workflow'.*no supports.*response.output_supports"):
                controller.rollout_batch([{"n": 1}])
        else:
            assert len(controller.rollout_batch([{"n": 1}]).trajectories) == 1


async def test_agent_when_training_truncates_asks_and_keeps_the_supports_of_all_its_turns() -> None:
    class Kept(ScriptedEngine):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            made = await super().agenerate(request)
            made.output_supports = matrix(*([token, 1] for token in made.output_tokens))
            return made

    class Agent:
        async def run(self, data: dict[str, Any], session: Any) -> float:
            answer = await session.create({"messages": [user("?")], "top_p": 0.9, "top_k": 5})
            await session.create({"messages": [user("?"), message_of(answer), user("again")]})
            return 1.0

    tokenizer = tiny_tokenizer(TOOLS)
    engine = Kept(tokenizer, "a" + END, "b" + END)
    runner = AgentRunner(Agent(), TRUNCATED.new(max_new_tokens=8), tokenizer, None, AgentConfig())

    (made,) = await runner.arun_episode(EpisodeEngine(engine, with_supports=True), {})

    assert [request.return_supports for request in engine.requests] == [True, True]
    assert made.supports is not None
    np.testing.assert_array_equal(made.supports[made.loss_mask][:, 0], made.input_ids[made.loss_mask])
    assert made.loss_mask.sum() == 4 and (made.supports[~made.loss_mask] == -1).all()
