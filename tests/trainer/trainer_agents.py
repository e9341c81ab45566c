"""Agents of these tests, found by import path."""

from __future__ import annotations

from typing import Any

NOTE = {"type": "function", "function": {"name": "note", "description": "Write down.", "parameters": {}}}


class AskingAgent:
    """Asks, asks again, and on some rows begins another chat; rewards by what was said."""

    def __init__(self, gconfig: Any) -> None:
        self.max_tokens = gconfig.max_new_tokens

    async def run(self, data: dict[str, Any], client: Any, reward_fn: Any, session: Any) -> dict[str, float]:
        messages: list[Any] = list(data["messages"])
        rewards: dict[str, float] = {}
        for turn in range(3):
            response = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=self.max_tokens, n=1 + (turn == 1)
            )
            choice = response.choices[-1]
            ids = session.completions[choice.completion_id].output_ids
            rewards[choice.completion_id] = await reward_fn("", choice.message.content, [], ids)
            messages = [*messages, choice.message, {"role": "user", "content": "again"}]
            if turn == 1 and len(ids) % 2:
                messages = list(data["messages"])
        return rewards


class NoisyAgent:
    """Sets a temperature that the trainer does not know of."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=data["messages"], temperature=0.3)
        return 1.0
