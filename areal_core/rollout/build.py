"""From the configuration to a workflow with its reward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import attrs

from areal_core.api.configs import RewardConfig, RLConfig
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.api.reward_api import AsyncRewardWrapper, RewardError
from areal_core.errors import BadInputError


class PluginLoader(Protocol):
    """What is needed of the plugin manager."""

    def load(self, registry: str, name: str, key: str | None = None) -> Any: ...


class ScoredReward:
    """A reward with a policy for its errors, as workflows get it.

    ``reject`` lets ``RewardError`` through, and the controller rejects the episode with the reason ``reward_KIND``;
    ``zero`` scores 0; ``raise`` stops the run.
    """

    def __init__(self, reward: AsyncRewardWrapper, on_error: Literal["reject", "zero", "raise"] = "reject") -> None:
        self.reward, self.on_error = reward, on_error

    async def __call__(
        self, prompt: Any, completions: Any, prompt_ids: Any = None, completion_ids: Any = None, **data: Any
    ) -> float:
        try:
            return await self.reward(prompt, completions, prompt_ids, completion_ids, **data)
        except RewardError as error:
            if self.on_error == "reject":
                raise
            if self.on_error == "zero":
                return 0.0
            raise BadInputError(
                f"{error}. A reward returns a finite number; reward.on_error: reject or zero would go on without it."
            ) from error

    def export_stats(self) -> dict[str, float]:
        return self.reward.export_stats()


def build_reward(config: RewardConfig, manager: PluginLoader) -> AsyncRewardWrapper:
    """The reward that ``config`` names, with its options bound."""
    fn = manager.load("areal_rewards", config.name, key="reward.name")
    options = options_of(config.plugin_options, config.name)
    if not callable(fn):
        raise BadInputError(f"reward.name: {config.name!r} is a {type(fn).__name__}, not a function.")
    if options:
        fn = functools.partial(fn, **options)
    return AsyncRewardWrapper(fn, timeout=config.timeout, max_workers=config.max_workers, name=config.name)


def build_workflow(
    config: RLConfig,
    tokenizer: Any,
    manager: PluginLoader,
    gconfig: GenerationHyperparameters,
    *,
    reward: AsyncRewardWrapper | None = None,
) -> tuple[Any, AsyncRewardWrapper]:
    """The workflow that ``config`` names, and its reward; ``destroy`` the reward at the end of the run.

    Args:
        gconfig: sampling (that of an evaluation may differ from training's).
        reward: use this one instead of making one, so that training and evaluation share their processes.
    """
    if reward is None:
        reward = build_reward(config.reward, manager)
    target = manager.load("areal_workflows", config.workflow.name, key="workflow.name")
    available = {
        "gconfig": gconfig,
        "tokenizer": tokenizer,
        "reward_fn": ScoredReward(reward, config.reward.on_error),
    }
    options = options_of(config.workflow.plugin_options, config.workflow.name)
    return _construct(target, available, options, config.workflow.name), reward


def options_of(plugin_options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The selected plugin's options as keyword arguments; ``name@distribution`` has the options of ``name``."""
    options = plugin_options.get(name, plugin_options.get(name.partition("@")[0]))
    if options is None:
        return {}
    return attrs.asdict(options, recurse=False) if attrs.has(type(options)) else dict(options)


def _construct(target: Callable[..., Any], available: dict[str, Any], options: dict[str, Any], name: str) -> Any:
    if not callable(target):
        raise BadInputError(f"workflow.name: {name!r} is a {type(target).__name__}, not a class.")
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        parameters = inspect.signature(lambda gconfig, tokenizer, reward_fn: None).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {key: value for key, value in available.items() if takes_any or key in parameters}
    unknown = [key for key in options if not takes_any and key not in parameters]
    if unknown:
        raise BadInputError(
            f"workflow.{name}: its constructor lacks a parameter for {', '.join(unknown)} of its config class."
        )
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and key not in given
        and key not in options
    ]
    if missing:
        raise BadInputError(
            f"workflow.name: the constructor of {name!r} needs {', '.join(missing)}, which nothing gives. It may take "
            "gconfig, tokenizer, reward_fn and the options of its config class."
        )
    return target(**given, **options)


def check_workflow(workflow: Any) -> Any:
    """A workflow object of a workflow or of a function that makes one; a clear error for anything else."""
    if not hasattr(workflow, "arun_episode") and not hasattr(workflow, "run") and callable(workflow):
        workflow = workflow()
    if callable(getattr(workflow, "arun_episode", None)) and not isinstance(workflow, type):
        return workflow
    name = workflow.__name__ if isinstance(workflow, type) else type(workflow).__name__
    if callable(getattr(workflow, "run", None)):
        raise BadInputError(
            f"workflow {name} is an agent (it has `run`, not `arun_episode`), which this version cannot play. "
            "Write a RolloutWorkflow with `async def arun_episode(self, engine, data)`."
        )
    raise BadInputError(f"{name} is not a workflow: it has no `async def arun_episode(self, engine, data)`.")
