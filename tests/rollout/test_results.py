import attrs
import numpy as np
import pytest
import torch

from areal_core.api.io_struct import ModelResponse, Trajectory
from areal_core.rollout.results import WorkflowResultError, as_trajectories

TOKENS = {
    "input_ids": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "logprobs": [0.0, -1.5, -0.5],
    "versions": [-1, 4, 4],
}


def trajectory(reward=1.0):
    response = ModelResponse(
        input_tokens=[1], output_tokens=[2, 3], output_logprobs=[-1.5, -0.5], output_versions=[4, 4]
    )
    return Trajectory.from_response(response, reward)


def as_tensors(batch):
    dtypes = {"input_ids": torch.int64, "loss_mask": torch.bool, "logprobs": torch.bfloat16, "versions": torch.int32}
    tensors = {name: torch.tensor(value, dtype=dtypes[name]) for name, value in TOKENS.items()}
    return {name: value[None] if batch else value for name, value in tensors.items()}


@pytest.mark.parametrize(
    "result",
    [
        {**TOKENS, "reward": 1.0},
        {**TOKENS, "rewards": np.float32(1.0)},
        {**{name: np.array(value) for name, value in TOKENS.items()}, "reward": 1},
        {**as_tensors(batch=False), "rewards": torch.tensor(1.0)},
        {**as_tensors(batch=True), "rewards": torch.tensor([1.0])},
        {**as_tensors(batch=True), "rewards": torch.tensor([[1.0]]), "attention_mask": torch.ones(1, 3)},
        {**TOKENS, "rewards": {"a": 0.75, "b": 0.25}},
        {**TOKENS, "reward": 1.0, "group_id": 7},
        trajectory(),
        [trajectory()],
        [{**TOKENS, "reward": 1.0}],
    ],
    ids=[
        "lists",
        "rewards",
        "numpy",
        "tensors",
        "batch",
        "attention",
        "named",
        "group",
        "trajectory",
        "list",
        "list of dicts",
    ],
)
def test_results_when_well_formed_give_one_trajectory(result):
    (made,) = as_trajectories(result, "w")

    assert made.input_ids.tolist() == TOKENS["input_ids"]
    assert made.loss_mask.tolist() == [False, True, True]
    np.testing.assert_array_equal(made.logprobs, np.array(TOKENS["logprobs"], dtype=np.float32))
    assert made.versions.tolist() == TOKENS["versions"]
    assert made.reward == 1.0
    assert made.group_id == ""


def test_results_when_attention_mask_marks_padding_leave_it_out():
    padded = {name: [*value, 0, 0] for name, value in TOKENS.items()}

    (made,) = as_trajectories({**padded, "reward": 1.0, "attention_mask": [1, 1, 1, 0, 0]}, "w")

    assert made.input_ids.tolist() == TOKENS["input_ids"]
    assert len(made.logprobs) == 3


@pytest.mark.parametrize("result", [None, []])
def test_results_when_nothing_is_returned_give_none(result):
    assert as_trajectories(result, "w") == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", "workflow 'w': returned a str"),
        (1.0, "returned a float"),
        ([trajectory(), None], "workflow 'w', trajectory 1: returned a NoneType"),
        ({"input_ids": [1], "output_ids": [2], "reward": 1.0}, "lacks loss_mask, logprobs, versions; it has input_ids"),
        (TOKENS, "lacks reward"),
        ({**TOKENS, "reward": 1.0, "logprob": []}, "unknown field logprob"),
        ({**TOKENS, "reward": 1.0, "logprobs": [0.0]}, "logprobs has 1 entries, but input_ids has 3"),
        ({**TOKENS, "reward": 1.0, "logprobs": np.zeros((2, 3))}, r"logprobs has shape \[2, 3\]"),
        ({**TOKENS, "reward": 1.0, "input_ids": [1.0, 2.0, 3.0]}, "input_ids holds float64"),
        ({**TOKENS, "reward": 1.0, "versions": ["a", "b", "c"]}, "versions is a list of <U1"),
        ({**TOKENS, "reward": 1.0, "logprobs": [[1.0], [1.0, 2.0], []]}, "logprobs is no array"),
        ({**TOKENS, "reward": [1.0, 2.0]}, r"reward has shape \[2\]"),
        ({**TOKENS, "reward": True}, "reward has shape"),
        ({**TOKENS, "reward": float("nan")}, "reward is nan"),
        ({**TOKENS, "reward": 1.0, "logprobs": [0.0, float("nan"), 0.0]}, "logprobs holds NaN"),
        ({**TOKENS, "reward": 1.0, "loss_mask": [0, 0, 0]}, "loss_mask marks no token of 3"),
        ({**TOKENS, "reward": 1.0, "loss_mask": [1, 1, 1]}, "loss_mask marks the first token"),
        (trajectory(reward=None), "reward is a NoneType"),
        (trajectory(reward="1"), "reward is a str"),
    ],
)
def test_results_when_malformed_name_workflow_and_field(result, message):
    with pytest.raises(WorkflowResultError, match=message):
        as_trajectories(result, "w")


@pytest.mark.parametrize("fields", [{}, {"metadata": {"a": 1}, "rewards": {"b": 0.5}}, {"group_id": "g"}], ids=str)
@pytest.mark.parametrize("reward", [1.5, 2, np.float32(0.5)])
@pytest.mark.parametrize("output", [[], [4, 5]])
def test_trajectory_when_made_of_one_response_equals_that_of_its_only_turn(output, reward, fields):
    response = ModelResponse(
        input_tokens=[1, 2, 3],
        output_tokens=output,
        output_logprobs=[-0.25] * len(output),
        output_versions=[3] * len(output),
        stop_reason="length",
        latency=2.5,
    )

    quick = Trajectory.from_response(response, reward, **fields)
    slow = Trajectory.from_turns([response], reward, **fields)

    assert type(quick) is Trajectory
    for attribute in attrs.fields(Trajectory):
        one, other = getattr(quick, attribute.name), getattr(slow, attribute.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype and one.flags.writeable
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other and type(one) is type(other), attribute.name
    quick.logprobs = [0.0] * len(quick)
    assert quick.logprobs.dtype == np.float32


def test_trajectory_when_a_response_lacks_a_logprob_says_so():
    response = ModelResponse(input_tokens=[1], output_tokens=[2, 3], output_logprobs=[-1.0], output_versions=[0, 0])

    with pytest.raises(ValueError, match=r"logprobs has shape \(2,\), but input_ids has length 3"):
        Trajectory.from_response(response, 1.0)


@pytest.mark.parametrize("length", [3, 10_000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_results_when_a_logprob_is_not_finite_are_refused_at_any_length(length, bad):
    mask = np.arange(length) > 0
    made = Trajectory(
        input_ids=np.ones(length),
        loss_mask=mask,
        logprobs=np.where(np.arange(length) == 2, bad, -1.0),
        versions=np.where(mask, 0, -1),
    )

    with pytest.raises(WorkflowResultError, match="logprobs holds NaN or infinite"):
        as_trajectories(made, "w")


@pytest.mark.filterwarnings("ignore:overflow")
def test_results_when_squares_of_logprobs_overflow_are_still_good():
    made = Trajectory(input_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -3e38], versions=[-1, 0])

    assert as_trajectories(made, "w") == [made]
