"""From the configuration to a workflow with its reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_core.api.configs import RLConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.config.plain import plugin_keywords
from areal_core.data.processor import load_processor
from areal_core.errors import BadInputError
from areal_core.rollout.rewards import PluginLoader, Reward, build_rewards


def build_workflow(
    config: RLConfig | DistillConfig,
    tokenizer: Any,
    manager: PluginLoader,
    gconfig: GenerationHyperparameters,
    *,
    reward: Reward | None = None,
    training: bool = True,
) -> tuple[Any, Reward]:
    """The workflow that ``config`` names, and its ``reward_fn``; ``destroy`` the latter at the end of the run.

    An agent (``run`` instead of ``arun_episode``) is given an ``AgentRunner`` that plays it.

    Args:
        gconfig: sampling (that of an evaluation may differ from training's).
        reward: use this one instead of making one, so that training and evaluation share their processes.
        training: whether what is sampled will be trained on; False for an evaluation.
    """
    if reward is None:
        reward = build_rewards(config, manager)
    target = manager.load("areal_workflows", config.workflow.name, key="workflow.name")
    available = {"gconfig": gconfig, "tokenizer": tokenizer, "reward_fn": reward}
    if "processor" in _parameters(target):
        available["processor"] = load_processor(
            config.tokenizer_path or config.actor.path, trust_remote_code=config.actor.trust_remote_code
        )
    options = plugin_keywords(config.workflow)
    workflow = _construct(target, available, options, config.workflow.name)
    if not is_agent(workflow):
        return workflow, reward
    # Loaded for agents only.
    from areal_core.rollout.agents.workflow import AgentRunner

    runner = AgentRunner(
        workflow,
        gconfig,
        tokenizer,
        reward,
        config.workflow.agent,
        name=config.workflow.name,
        training=training,
        on_error=config.reward.on_error if config.reward is not None else "reject",
    )
    return runner, reward


def is_agent(workflow: Any) -> bool:
    """Whether an object plays its episodes by itself, see ``areal_core.api.workflow_api.AgentWorkflow``."""
    return callable(getattr(workflow, "run", None)) and not callable(getattr(workflow, "arun_episode", None))


def _construct(target: Callable[..., Any], available: dict[str, Any], options: dict[str, Any], name: str) -> Any:
    if not callable(target):
        raise BadInputError(f"workflow.name: {name!r} is a {type(target).__name__}, not a class.")
    parameters = _parameters(target)
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
            "gconfig, tokenizer, processor, reward_fn and the options of its config class."
        )
    return target(**given, **options)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return inspect.signature(lambda gconfig, tokenizer, reward_fn: None).parameters


def check_workflow(workflow: Any) -> Any:
    """A workflow object of a workflow or of a function that makes one; a clear error for anything else."""
    is_class = isinstance(workflow, type)
    if not is_class and not hasattr(workflow, "arun_episode") and not hasattr(workflow, "run") and callable(workflow):
        workflow = workflow()
    has_episodes = callable(getattr(workflow, "arun_episode", None))
    name = workflow.__name__ if is_class else type(workflow).__name__
    if has_episodes and is_class:
        raise BadInputError(
            f"workflow {name} is a class. Give an object of it, {name}(...), or a function without parameters that "
            "makes one."
        )
    if has_episodes:
        return workflow
    if is_agent(workflow):
        raise BadInputError(
            f"workflow {name} is an agent (it has `run`, not `arun_episode`); it needs a tokenizer and sampling to be "
            "played. Name it as workflow.name, or give "
            "areal_core.rollout.agents.workflow.AgentRunner(agent, gconfig, tokenizer, reward_fn)."
        )
    raise BadInputError(
        f"{name} is not a workflow: it has neither `async def arun_episode(self, engine, data)` nor, as an agent, "
        "`async def run(self, data, **kwargs)`."
    )
