"""Reinforcement learning with a verifiable reward: one completion, one score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.api.reward_api import awaitable_reward
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.rollout.workflows.chat import check_length, check_tokenizer, first_prompt, messages_of, reward_columns


class RLVRWorkflow(RolloutWorkflow):
    """Asks once and scores the answer.

    Args:
        gconfig: sampling; the tokenizer's EOS and pad ids end a completion beside its own stop ids.
        tokenizer: a transformers tokenizer with a chat template.
        reward_fn: ``await reward_fn(prompt, completion, prompt_ids, completion_ids, **columns) -> float``, or a plain
            function of these, which is then wrapped (``AsyncRewardWrapper``).

    Raises:
        BadInputError: no chat template, no ``messages``, or a prompt that leaves no room for an answer.
    """

    def __init__(
        self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Callable[..., Awaitable[float] | float]
    ) -> None:
        check_tokenizer(tokenizer, "rlvr")
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.reward_fn = awaitable_reward(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        ids, prompt, full_prompt = self._prompt(engine, data)
        response = await engine.agenerate(
            ModelRequest(input_ids=ids, gconfig=self.gconfig, rid="", tokenizer=self.tokenizer)
        )
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward_fn(prompt, completion, ids, response.output_tokens, **reward_columns(data))
        return Trajectory.from_response(response, reward, metadata={"prompt": full_prompt, "completion": completion})

    def _prompt(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[list[int], str, str]:
        """(ids, text without special tokens, whole text); made once for a group."""
        cache: dict[Any, Any] = getattr(engine, "group_cache", {})
        if "prompt" not in cache:
            ids = first_prompt(self.tokenizer, messages_of(data), data)
            check_length(ids, self.gconfig.max_tokens, data)
            decode = self.tokenizer.decode
            cache["prompt"] = (ids, decode(ids, skip_special_tokens=True), decode(ids, skip_special_tokens=False))
        prompt: tuple[list[int], str, str] = cache["prompt"]
        return prompt
