import asyncio
import functools
import uuid

import attrs
import pytest
import reward_functions as rewards
import torch
from rollout_fakes import FakeEngine
from tiny_tokenizer import tiny_tokenizer

from areal_core.api.configs import (
    DatasetConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    RewardConfig,
    RLConfig,
    WorkflowConfig,
)
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.api.reward_api import AsyncRewardWrapper
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.errors import BadInputError
from areal_core.plugins.manager import get_plugin_manager
from areal_core.rollout.build import build_workflow
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.workflows.multi_turn import MultiTurnConfig, MultiTurnWorkflow
from areal_core.rollout.workflows.rlvr import RLVRWorkflow

GCONFIG = GenerationHyperparameters(max_new_tokens=8)


class Manager:
    """Names to objects, as the plugin manager would load them."""

    def __init__(self, **targets):
        self.targets = targets

    def load(self, registry, name, key=None):
        return self.targets[name]


@attrs.define(kw_only=True)
class Scale:
    scale: float = 3.0


def config(workflow="rlvr", workflow_options=None, reward_options=None, **reward):
    return RLConfig(
        actor=PPOActorConfig(path="model"),
        train_dataset=DatasetConfig(name="data"),
        reward=RewardConfig(name="mine", plugin_options=reward_options or {}, **reward),
        workflow=WorkflowConfig(name=workflow, plugin_options=workflow_options or {}),
    )


def build(config, fn=rewards.misbehave_reward_fn, **targets):
    manager = Manager(mine=fn, rlvr=RLVRWorkflow, multi_turn=MultiTurnWorkflow, **targets)
    return build_workflow(config, tiny_tokenizer(), manager, GCONFIG)


def score(workflow, completion):
    async def play():
        try:
            return await workflow.reward_fn("p", completion, [], [])
        finally:
            workflow.reward_fn.destroy()

    return asyncio.run(play())


def test_build_when_named_gives_the_workflow_and_its_reward():
    workflow, reward = build(config(timeout=7.0, max_workers=3))

    assert isinstance(workflow, RLVRWorkflow)
    assert workflow.reward_fn is reward
    assert (reward.reward.timeout, reward.reward.max_workers, reward.reward.name) == (7.0, 3, "mine")
    assert workflow.gconfig.max_new_tokens == 8


def test_build_when_workflow_has_options_passes_them():
    options = {"multi_turn": MultiTurnConfig(max_turns=5, feedback="again")}

    workflow, _ = build(config("multi_turn", workflow_options=options))

    assert (workflow.max_turns, workflow.feedback) == (5, "again")


def test_build_when_reward_has_options_binds_them():
    workflow, reward = build(config(reward_options={"mine": Scale()}), rewards.scaled_reward_fn)

    assert reward.reward.runs_in == "process"
    assert score(workflow, "xx") == 6.0


def test_build_when_constructor_takes_less_passes_less():
    class Bare:
        def __init__(self, reward_fn):
            self.reward_fn = reward_fn

    workflow, _ = build(config("bare"), bare=Bare)

    assert isinstance(workflow, Bare)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (lambda gconfig, engine_url: None, None, r"workflow\.name: the constructor of 'odd' needs engine_url"),
        (lambda gconfig: None, MultiTurnConfig(), "lacks a parameter for max_turns"),
        (3, None, "'odd' is a int, not a class"),
    ],
)
def test_build_when_constructor_cannot_be_called_says_why(target, options, message):
    with pytest.raises(BadInputError, match=message):
        build(config("odd", workflow_options={"odd": options} if options else None), odd=target)


@pytest.mark.parametrize("on_error", ["reject", "zero", "raise"])
def test_reward_when_it_fails_follows_on_error(on_error):
    workflow, reward = build(config(on_error=on_error), functools.partial(rewards.async_reward_fn))

    if on_error == "zero":
        assert score(workflow, "nan") == 0.0
    elif on_error == "reject":
        with pytest.raises(Exception, match="returned NaN") as info:
            score(workflow, "nan")
        assert not isinstance(info.value, BadInputError)
    else:
        with pytest.raises(BadInputError, match=r"returned NaN.*reward\.on_error"):
            score(workflow, "nan")
    assert reward.reward.stats["nan"] == 1


def test_build_when_given_a_reward_shares_it():
    _, reward = build(config())

    manager = Manager(rlvr=RLVRWorkflow)
    workflow, same = build_workflow(config(), tiny_tokenizer(), manager, GCONFIG, reward=reward)

    assert same is reward and workflow.reward_fn is reward


def test_build_when_using_the_plugin_manager_finds_the_built_in_workflows():
    manager = get_plugin_manager()

    assert manager.load("areal_workflows", "rlvr") is RLVRWorkflow
    assert manager.load("areal_workflows", "multi_turn") is MultiTurnWorkflow
    assert manager.options_class("areal_workflows", "multi_turn") is MultiTurnConfig


class Judge:
    def __call__(self, prompt, completions, prompt_ids, completion_ids, **data):
        return 1.0


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            lambda prompts, completions, **data: 1.0,
            r"takes \(prompts, completions, \*\*data\); a reward is called with",
        ),
        (lambda *, prompt, completions: 1.0, "too many positional arguments"),
        (Judge, r" is a class\. A reward is a function .* such a `__call__`, as Judge\(\.\.\.\) may be"),
    ],
)
def test_build_when_a_reward_cannot_be_called_as_one_says_how_it_is(fn, message):
    with pytest.raises(BadInputError, match=rf"reward\.name: 'mine'.*{message}"):
        build(config(), fn)


@pytest.mark.parametrize(
    "fn", [Judge(), lambda *args: 1.0, lambda a, b, c, d, answer: 1.0, functools.partial(rewards.scaled_reward_fn)]
)
def test_build_when_a_reward_can_be_called_as_one_takes_it(fn):
    _, reward = build(config(), fn)

    assert reward.reward.fn is fn


class WrittenForAreal(RolloutWorkflow):
    """As its users write one: wraps its reward, and gives tensors with a batch dimension."""

    def __init__(self, gconfig, tokenizer, reward_fn):
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine, data):
        ids = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        response = await engine.agenerate(
            ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=list(ids),
                gconfig=self.gconfig.new(n_samples=1),
                tokenizer=self.tokenizer,
            )
        )
        texts = (self.tokenizer.decode(ids), self.tokenizer.decode(response.output_tokens))
        reward = await self.async_reward_fn(*texts, response.input_tokens, response.output_tokens, **data)
        prompt, answer = response.input_len, response.output_len
        result = {
            "input_ids": torch.tensor(response.input_tokens + response.output_tokens),
            "loss_mask": torch.tensor([0] * prompt + [1] * answer),
            "logprobs": torch.tensor([0.0] * prompt + response.output_logprobs),
            "versions": torch.tensor([-1] * prompt + response.output_versions),
            "attention_mask": torch.ones(prompt + answer, dtype=torch.bool),
            "rewards": torch.tensor(reward),
        }
        return {name: value.unsqueeze(0) for name, value in result.items()}


def test_workflow_when_written_for_areal_plays_and_counts_its_reward():
    # Arrange: its attribute is not called reward_fn; the run's reward is given to the controller
    workflow, reward = build(config("areal"), rewards.async_reward_fn, areal=WrittenForAreal)
    rows = [{"messages": [{"role": "user", "content": "1+1?"}], "answer": "2", "_uid": f"0-{n}"} for n in range(2)]
    controller = RolloutController(
        FakeEngine(), workflow, InferenceEngineConfig(), batch_size=2, group_size=2, reward_fn=reward
    )

    # Act
    with controller:
        result = controller.rollout_batch(rows)

    # Assert
    assert [t.reward for t in result.trajectories] == [1.0] * 4
    assert all(t.input_ids[t.loss_mask].tolist() == [7, 8, 9] for t in result.trajectories)
    assert result.stats["reward/calls"] == 4.0
