"""One episode of an agent: answers its chat-completions requests, and records what was sampled."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from areal_core.api.configs import AgentConfig
from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.errors import BadInputError
from areal_core.rollout.agents.completions import Completion, FinishReason
from areal_core.rollout.agents.errors import (
    CONTEXT_LENGTH,
    ENGINE_ERROR,
    MAX_COMPLETIONS,
    APIError,
    no_session,
    unsupported,
)
from areal_core.rollout.agents.messages import Message, chain, digest, extend, for_template
from areal_core.rollout.agents.request import ChatRequest, choice_seed, parse_request
from areal_core.rollout.agents.responses import chat_completion, chunks
from areal_core.rollout.tools.parsers import ParsedAnswer, ToolCallParser, template_of
from areal_core.rollout.turns import TurnEncoder

MODEL = "policy"


@attrs.frozen(kw_only=True)
class SessionSettings:
    """What the sessions of a workflow share.

    Attributes:
        turns: the chat template.
        gconfig: the run's sampling, with the tokenizer's stop ids.
        config: options.
        parser: reads tool calls; None: they stay text.
    """

    turns: TurnEncoder
    gconfig: GenerationHyperparameters
    config: AgentConfig
    parser: ToolCallParser | None

    @property
    def tokenizer(self) -> Any:
        return self.turns.tokenizer


class AgentSession:
    """Plays the server of one episode. It needs no ``openai``: requests and answers are plain dicts.

    A request whose messages begin with an earlier request's messages and the answer to it extends that completion: its
    prompt is the very ids that were sampled, and then what the chat template puts after them. Text is never encoded
    again. Any other request is rendered afresh and begins a new branch.

    Args:
        engine: the episode's engine (``EpisodeEngine``).
        settings: shared by the workflow's sessions.
        training: whether the trainer will compute log-probs of what is sampled.
        check_reward: turns what the agent gives as a reward into a float, or raises.

    Attributes:
        completions: all that were sampled, by id.
        stats: counts: ``completions``, ``branches`` (chats begun anew, beyond the first), ``tool_calls``,
            ``malformed_tool_calls``, ``refused_requests``.
        failure: what the engine raised last, or None.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        settings: SessionSettings,
        *,
        training: bool = True,
        check_reward: Callable[[Any, str], float] | None = None,
    ) -> None:
        self.engine, self.settings, self.training = engine, settings, training
        self.completions: dict[str, Completion] = {}
        self.stats: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._check_reward = check_reward or (lambda value, what: float(value))
        self._cache: dict[Any, Any] = getattr(engine, "group_cache", {})
        self._scope = str(getattr(engine, "episode_id", id(self)))
        self._name = digest(self._scope).hex()[:16]
        self._ends: dict[bytes, list[Completion]] = {}
        # Requests that go on from a completion, or (None) begin a chat; those under way included.
        self._continued: Counter[str | None] = Counter()
        self._requests = self._sampled = 0
        self._at_work: set[asyncio.Task[Any]] = set()
        self._closed = False

    # ------------------------------------------------------------------------------------------------- the agent's

    async def create(self, request: Mapping[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Answer the body of ``POST /v1/chat/completions``.

        Returns:
            A ``chat.completion``, or with ``stream: true`` the chunks of one. (They come when the whole answer has been
            sampled.)

        Raises:
            APIError: a request that cannot be honoured; ``status`` and ``body()`` are what a server would answer.
        """
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        try:
            return await self._create(request)
        except APIError:
            self.stats["refused_requests"] += 1
            raise
        finally:
            self._at_work.discard(task)

    def close(self) -> None:
        """End the episode: further requests are refused, and those that the agent left running are cancelled."""
        self._closed = True
        for task in self._at_work:
            task.cancel()

    def models(self) -> dict[str, Any]:
        """The body of ``GET /v1/models``."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "areal"}]}

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Give a completion its reward; a later one replaces it.

        Raises:
            KeyError: if this session has no such completion.
        """
        completion = self.completions.get(completion_id)
        if completion is None:
            known = ", ".join(list(self.completions)[-3:]) or "none so far"
            raise KeyError(f"completion {str(completion_id)[:80]!r} is not of this episode (its last ones: {known})")
        completion.reward = self._check_reward(reward, f"completion {completion_id!r}")

    def set_last_reward(self, reward: float) -> None:
        """Give the last request's completion its reward (of several choices, the one that came back, or the first).

        Raises:
            KeyError: if nothing was sampled.
        """
        if not self.completions:
            raise KeyError("the episode has no completion that a reward could belong to")
        order = max(completion.order for completion in self.completions.values())
        last = [completion for completion in self.completions.values() if completion.order == order]
        self.set_reward(next((c for c in last if c.children), last[0]).id, reward)

    # --------------------------------------------------------------------------------------------------- requests

    async def _create(self, request: Mapping[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
        settings = self.settings
        if self._closed:
            raise no_session()
        chat = parse_request(
            request,
            settings.gconfig,
            training=self.training,
            conflicts=settings.config.sampling_conflicts,
            default_model=MODEL,
        )
        self._check_tools(chat)
        start = digest([chat.tools, chat.template_options])
        keys = list(chain(chat.messages, start))
        parent, length = self._parent(keys)
        try:
            prompt = self._prompt(chat, parent, length, keys[-1])
        except BadInputError as error:
            raise self._failed(error) from error
        except Exception as error:
            raise APIError(
                f"messages: the chat template cannot render them: {type(error).__name__}: {error}",
                param="messages",
                code="invalid_value",
            ) from error
        self._count(chat.n)
        order, self._requests = self._requests, self._requests + 1
        origin = None if parent is None else parent.id
        self.stats["branches"] += origin is None and self._continued[None] > 0
        self._continued[origin] += 1
        try:
            responses = await self._sample(chat, prompt)
        except BaseException:
            self._continued[origin] -= 1
            raise
        completions = [self._record(chat, response, parent, order, i, keys[-1]) for i, response in enumerate(responses)]
        answer = chat_completion(completions, chat.model, settings.tokenizer, logprobs=chat.logprobs)
        return chunks(answer, include_usage=chat.include_usage) if chat.stream else answer

    def _check_tools(self, chat: ChatRequest) -> None:
        if not chat.tools:
            return
        name = getattr(self.settings.tokenizer, "name_or_path", "")
        if "tools" not in template_of(self.settings.tokenizer):
            raise unsupported("tools", f"the chat template of {name!r} does not show them to the model; use another")
        if chat.parse_tools and self.settings.parser is None and self.settings.config.tool_call_parser == "auto":
            raise unsupported(
                "tools",
                f"the chat template of {name!r} does not tell how its model writes calls; set "
                "workflow.agent.tool_call_parser to hermes or llama3_json (or none, to get calls as text)",
            )

    def _count(self, n: int) -> None:
        most = self.settings.config.max_completions
        if most is not None and self._sampled + n > most:
            raise APIError(
                f"the episode has {self._sampled} completions, and {n} more would exceed its "
                f"workflow.agent.max_completions of {most}",
                status=429,
                code=MAX_COMPLETIONS,
            )
        self._sampled += n

    def _parent(self, keys: list[bytes]) -> tuple[Completion | None, int]:
        """The completion that a chat goes on from, and how many of the chat's messages its answer ends."""
        for length in range(len(keys) - 1, 0, -1):
            found = self._ends.get(keys[length])
            if found:
                # Answers that read alike: one for each chat that goes on, as far as they last.
                return next((c for c in found if not self._continued[c.id]), found[-1]), length
        return None, 0

    def _prompt(self, chat: ChatRequest, parent: Completion | None, length: int, key: bytes) -> list[int]:
        turns = self.settings.turns
        messages = for_template(chat.messages, template_of(turns.tokenizer, chat.tools))
        if parent is not None:
            answer, before, after = messages[length - 1], messages[: length - 1], messages[length:]
            tail = turns.tail(before, answer, after, chat.tools, chat.template_options)
            between = turns.continuation(tail, turns.sampled_end(parent.response))
            return [*parent.prompt_ids, *parent.output_ids, *between]
        # The samples of a group begin with the same chat.
        cached = self._cache.get(("agent prompt", key))
        if cached is None:
            cached = turns.encode(turns.render(messages, chat.tools, chat.template_options))
            self._cache["agent prompt", key] = cached
        prompt: list[int] = cached
        return prompt

    async def _sample(self, chat: ChatRequest, prompt: list[int]) -> list[ModelResponse]:
        most = chat.gconfig.max_tokens
        if most is not None and len(prompt) >= most and self.completions:
            raise self._too_long(f"the chat has {len(prompt)} tokens; gconfig.max_tokens is {most}")
        requests = [
            ModelRequest(
                input_ids=prompt,
                gconfig=chat.gconfig.new(seed=self._seed(chat, choice)),
                rid="",
                tokenizer=self.settings.tokenizer,
            )
            for choice in range(chat.n)
        ]
        try:
            if len(requests) == 1:
                return [await self.engine.agenerate(requests[0])]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.engine.agenerate(request)) for request in requests]
            return [task.result() for task in tasks]
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, BadInputError) and self.completions:
                raise self._too_long(str(error)) from error
            raise self._failed(error) from error

    def _seed(self, chat: ChatRequest, choice: int) -> int | None:
        seed = chat.seed if chat.seed is not None else chat.gconfig.seed
        if seed is None or (chat.n == 1 and not self.training):
            return seed
        return choice_seed(seed, self._scope if self.training else "", choice)

    def _failed(self, error: Exception) -> APIError:
        self.failure = error
        return APIError(f"{type(error).__name__}: {error}", status=500, code=ENGINE_ERROR)

    def _too_long(self, message: str) -> APIError:
        # As in the workflow multi_turn: a first prompt that cannot be answered is the dataset's mistake; a later one
        # means that the dialogue has outgrown the context.
        return APIError(message, param="messages", code=CONTEXT_LENGTH)

    def _record(
        self, chat: ChatRequest, response: ModelResponse, parent: Completion | None, order: int, index: int, key: bytes
    ) -> Completion:
        parsed = self._parse(chat, response)
        identity = f"chatcmpl-{self._name}-{order}"
        calls = []
        for number, call in enumerate(parsed.calls):
            # Derived, so that a run repeats: templates may show it. Nine letters and digits, as some demand.
            name = hashlib.blake2b(f"{self._scope}/{order}/{index}/{number}".encode(), digest_size=8).hexdigest()[:9]
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": name, "type": "function", "function": function})
        finish: FinishReason = "length" if response.stop_reason == "length" else "tool_calls" if calls else "stop"
        message: Message = {"role": "assistant", "content": parsed.content}
        if calls:
            with_dicts = [
                {**shown, "function": {"name": call.name, "arguments": call.as_dict()}}
                for shown, call in zip(calls, parsed.calls, strict=True)
            ]
            message["tool_calls"] = with_dicts
        completion = Completion(
            id=identity if index == 0 else f"{identity}#{index}",
            request_id=identity,
            order=order,
            index=index,
            n=chat.n,
            messages=chat.messages,
            message=message,
            tool_calls=calls,
            finish_reason=finish,
            response=response,
            parent=parent,
            created=int(time.time()),
        )
        if parent is not None:
            parent.children.append(completion)
        self.completions[completion.id] = completion
        self._ends.setdefault(extend(key, message), []).append(completion)
        self.stats.update(completions=1, tool_calls=len(calls), malformed_tool_calls=parsed.malformed)
        return completion

    def _parse(self, chat: ChatRequest, response: ModelResponse) -> ParsedAnswer:
        tokenizer, ids = self.settings.tokenizer, self.settings.turns.said(response)
        parser = self.settings.parser if chat.parse_tools else None
        text = parser.text_of(tokenizer, ids) if parser else str(tokenizer.decode(ids, skip_special_tokens=True))
        if response.stop_reason != "length":
            # The ids keep the stop string; the text of the API does not show it.
            cuts = [at for at in (text.rfind(string) for string in chat.gconfig.stop) if at >= 0]
            text = text[: min(cuts)] if cuts else text
        return parser.parse(text) if parser else ParsedAnswer(text)
