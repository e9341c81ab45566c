"""The workflow `hinted`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.api.workflow_api import RolloutWorkflow


class HintedWorkflow(RolloutWorkflow):
    """Asks once, with a hint below the question."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        reward_fn: Callable[..., Awaitable[float]],
        hint: str,
    ) -> None:
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer, self.reward_fn, self.hint = tokenizer, reward_fn, hint

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        *before, last = data["messages"]
        messages = [*before, {**last, "content": f"{last['content']} {self.hint}"}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer))
        if not response.output_tokens:
            return None
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        columns = {key: value for key, value in data.items() if key != "messages" and not key.startswith("_")}
        reward = await self.reward_fn(prompt, completion, ids, response.output_tokens, **columns)
        return Trajectory.from_response(
            response, reward, metadata={"prompt": prompt, "completion": completion, "hint": self.hint}
        )
