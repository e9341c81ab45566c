"""Plays an agent as a workflow: gives it a client, takes its rewards, and exports what it sampled."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from areal_core.api.configs import AgentConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, Trajectory
from areal_core.api.reward_api import RewardError, awaitable_reward
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.errors import BadInputError
from areal_core.rollout.agents.client import AgentClients
from areal_core.rollout.agents.completions import chosen
from areal_core.rollout.agents.errors import (
    CONTEXT_LENGTH,
    ENGINE_ERROR,
    MAX_COMPLETIONS,
    refusal_behind,
    single_errors,
)
from areal_core.rollout.agents.export import export_concat, export_individual
from areal_core.rollout.agents.rewards import OnError, RewardJudge
from areal_core.rollout.agents.session import MODEL, AgentSession, SessionSettings
from areal_core.rollout.episode import EpisodeRejected
from areal_core.rollout.tools.parsers import find_parser
from areal_core.rollout.turns import TurnEncoder
from areal_core.rollout.workflows.chat import check_tokenizer

_OPENAI_KEYWORDS = ("client", "http_client")
_KEYWORDS = (*_OPENAI_KEYWORDS, "base_url", "api_key", "model", "reward_fn", "engine", "session", "tokenizer")


class AgentRunner(RolloutWorkflow):
    """One episode is one call of ``agent.run``.

    ``await agent.run(data, **keywords)`` gets those of these keywords that it has parameters for (with ``**kwargs``,
    all): ``client`` (an ``openai.AsyncOpenAI`` in this process), ``base_url``, ``api_key`` and ``http_client`` (for
    libraries that make their own client), ``model`` (a name for requests), ``reward_fn``, ``session``
    (``AgentSession``: ``create``, ``set_reward``, ``set_last_reward``), ``engine``, ``tokenizer``.

    It returns the reward of its last completion, a dict from completion id to reward, or None: then the rewards that it
    gave to the session count, and if there are none, the episode is rejected. A reward that is no finite number is
    treated as ``reward.on_error`` says. An exception makes the controller try again. An agent that does not catch the
    refusal of a request beyond ``max_completions`` or the context is rejected (``agent_max_completions``,
    ``agent_context_length``), as is one without a completion (``agent_no_completion``).

    Args:
        agent: an object with ``async def run(self, data, **kwargs)``.
        gconfig, tokenizer, reward_fn: as for ``rlvr``.
        config: options.
        name: of the workflow, for messages.
        training: whether the trainer will compute log-probs of what is sampled; requests that would bias them are
            refused.
        on_error: what is done about rewards of the agent that are no finite numbers.

    Raises:
        BadInputError: for an agent that cannot be called so, or if ``openai`` is needed and missing.
    """

    def __init__(
        self,
        agent: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        reward_fn: Any,
        config: AgentConfig | None = None,
        *,
        name: str | None = None,
        training: bool = True,
        on_error: OnError = "reject",
    ) -> None:
        self.agent, self.reward_fn, self.training = agent, awaitable_reward(reward_fn), training
        self.name = name or type(agent).__name__
        check_tokenizer(tokenizer, self.name)
        self.config = config if config is not None else AgentConfig()
        gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self._settings = SessionSettings(
            turns=TurnEncoder(tokenizer, gconfig.stop_token_ids, f"workflow {self.name!r}"),
            gconfig=gconfig,
            config=self.config,
            parser=find_parser(self.config.tool_call_parser, tokenizer, "workflow.agent.tool_call_parser"),
        )
        self._judge = RewardJudge(self.name, on_error)
        self._keywords = _keywords_of(agent, self.name)
        needs_client = any(keyword in self._keywords for keyword in _OPENAI_KEYWORDS)
        self._clients = AgentClients(self.name) if needs_client else None
        self._stats: Counter[str] = Counter()

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> list[Trajectory | dict[str, Any]] | None:
        session = AgentSession(engine, self._settings, training=self.training, check_reward=self._judge.checked)
        try:
            with self._clients.open(session) if self._clients is not None else nullcontext() as access:
                result = await self.agent.run(_own(data), **self._given(engine, session, access))
        except Exception as error:
            explained = _explained(session, error)
            if explained is error:
                raise
            raise explained from error
        finally:
            session.close()
            self._stats.update(session.stats)
        if isinstance(session.failure, BadInputError):
            raise session.failure
        if not self._take_rewards(session, result):
            return None
        return [*self._export(session)]

    def export_stats(self) -> dict[str, float]:
        """Counts since the last call, summed over episodes, e.g. ``agent/completions`` and ``agent/branches``."""
        stats, self._stats = self._stats, Counter()
        names = ("completions", "branches", "tool_calls", "malformed_tool_calls", "refused_requests", "dropped_choices")
        errors, self._judge.errors = self._judge.errors, Counter()
        result = {f"agent/{name}": float(stats[name]) for name in names}
        result.update({f"agent/reward_errors/{kind}": float(count) for kind, count in sorted(errors.items())})
        return result

    def _given(self, engine: InferenceEngine, session: AgentSession, access: Any) -> dict[str, Any]:
        values = {
            "session": session,
            "engine": engine,
            "reward_fn": self.reward_fn,
            "tokenizer": self._settings.tokenizer,
            "model": MODEL,
        }
        if access is not None:
            values.update({name: getattr(access, name) for name in ("client", "base_url", "api_key", "http_client")})
        return {name: values[name] for name in self._keywords if name in values}

    def _take_rewards(self, session: AgentSession, result: Any) -> bool:
        """Give the completions the rewards that the agent returned; False to reject the episode."""
        if result is None:
            return any(completion.reward is not None for completion in session.completions.values())
        if not session.completions:
            raise EpisodeRejected("agent_no_completion")
        if not isinstance(result, Mapping):
            session.set_last_reward(result)
            return True
        for completion_id, value in result.items():
            try:
                session.set_reward(completion_id, value)
            except KeyError as error:
                self._judge.failed("type", f"returned a reward that has no place: {error.args[0]}")
        if not any(completion.reward is not None for completion in session.completions.values()):
            self._judge.failed("none", "returned a dict without a reward; return None to reject the episode")
            session.set_last_reward(0.0)
        return True

    def _export(self, session: AgentSession) -> list[Trajectory]:
        completions = list(session.completions.values())
        self._stats["dropped_choices"] += len(completions) - len(chosen(completions))
        export = export_concat if self.config.export == "concat" else export_individual
        trajectories = export(completions, self.config.turn_discount, self._settings.tokenizer)
        if not trajectories:
            raise EpisodeRejected("agent_no_completion")
        return trajectories


def _own(value: Any) -> Any:
    """A row whose lists and dicts an agent may change: it will append to its messages, and others play the row too."""
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return [_own(item) for item in value] if isinstance(value, list) else value


def _explained(session: AgentSession, error: Exception) -> Exception:
    """What the controller should see instead of ``error``, which may only be what the client made of it."""
    found = [_explanation(session, single) for single in single_errors(error)]
    # A mistake of the agent's own is not hidden behind what else went wrong.
    known = [explanation for explanation in found if explanation is not None]
    if len(known) < len(found):
        return error
    return next((explanation for explanation in known if isinstance(explanation, BadInputError)), known[0])


def _explanation(session: AgentSession, error: BaseException) -> Exception | None:
    if isinstance(error, (EpisodeRejected, RewardError, BadInputError)):
        return error
    refusal = refusal_behind(error)
    if refusal == ENGINE_ERROR:
        return session.failure
    reasons = {MAX_COMPLETIONS: "agent_max_completions", CONTEXT_LENGTH: "agent_context_length"}
    return EpisodeRejected(reasons[refusal]) if refusal in reasons else None


def _keywords_of(agent: Any, name: str) -> tuple[str, ...]:
    """The keywords that ``agent.run`` takes."""
    run = getattr(agent, "run", None)
    if not inspect.iscoroutinefunction(run):
        raise BadInputError(
            f"workflow {name!r}: `run` must be `async def run(self, data, **kwargs)`: thousands of episodes share one "
            "event loop, and a function that blocks would hold all of them up."
        )
    parameters = list(inspect.signature(run).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise BadInputError(f"workflow {name!r}: `run` must take the dataset's row first: run(self, data, **kwargs).")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _KEYWORDS
    names = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in parameters[1:] if p.default is p.empty and p.name in names and p.name not in _KEYWORDS]
    if missing:
        raise BadInputError(
            f"workflow {name!r}: `run` needs {', '.join(missing)}, which nothing gives. It may take "
            f"{', '.join(_KEYWORDS)}; columns of the row are in `data`."
        )
    return tuple(keyword for keyword in _KEYWORDS if keyword in names)
