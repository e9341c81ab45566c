"""A scripted engine for agents, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_fakes import FakeEngine
from tiny_tokenizer import TOOLS, tiny_tokenizer

from areal_core.api.configs import AgentConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_core.rollout.agents.session import AgentSession, SessionSettings
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.tools.parsers import find_parser
from areal_core.rollout.turns import TurnEncoder

GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=64)
END = "<|im_end|>"
WITH_TOOLS = tiny_tokenizer(TOOLS)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


class ScriptedEngine(FakeEngine):
    """Answers with these ids (or texts, a token for each character) in turn; each token has a log-prob of its own."""

    def __init__(self, tokenizer, *answers: str | Sequence[int] | Exception, stop_reasons: Sequence[str] = ()) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.stop_reasons = list(stop_reasons)
        self.responses: list[ModelResponse] = []
        self.on_request: Callable[[ModelRequest], None] = lambda request: None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        self.on_request(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = spelled(self.tokenizer, answer) if isinstance(answer, str) else list(answer)
        start = sum(len(response.output_tokens) for response in self.responses)
        response = ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=ids,
            output_logprobs=[-0.001 * (start + i + 1) for i in range(len(ids))],
            output_versions=[self.version] * len(ids),
            stop_reason=self.stop_reasons.pop(0) if self.stop_reasons else "stop",
        )
        self.responses.append(response)
        return response


def spelled(tokenizer, text: str) -> list[int]:
    """Ids of a text letter by letter, whatever merges there are; special tokens are one id."""
    ids: list[int] = []
    while text:
        special = next((token for token in tokenizer.all_special_tokens if text.startswith(token)), None)
        piece = special or text[0]
        if special:
            ids.append(tokenizer.convert_tokens_to_ids(special))
        else:
            ids += tokenizer.encode(piece, add_special_tokens=False)
        text = text[len(piece) :]
    return ids


def make_settings(tokenizer, gconfig=GCONFIG, **options) -> SessionSettings:
    config = AgentConfig(**options)
    gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
    return SessionSettings(
        turns=TurnEncoder(tokenizer, gconfig.stop_token_ids, "workflow 'test'"),
        gconfig=gconfig,
        config=config,
        parser=find_parser(config.tool_call_parser, tokenizer, "workflow.agent.tool_call_parser"),
    )


def make_session(*answers, tokenizer=None, training=True, gconfig=GCONFIG, stop_reasons=(), **options):
    """(session, engine) of one episode."""
    tokenizer = tokenizer if tokenizer is not None else WITH_TOOLS
    engine = ScriptedEngine(tokenizer, *answers, stop_reasons=stop_reasons)
    episode = EpisodeEngine(engine, uid="0-0", sample=1, attempt=0)
    return AgentSession(episode, make_settings(tokenizer, gconfig, **options), training=training), engine


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def message_of(response: dict) -> dict:
    return response["choices"][0]["message"]
