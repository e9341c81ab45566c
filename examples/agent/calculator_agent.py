"""An agent that solves word problems with a calculator, and demonstrations of it to start from.

workflow.name=calculator_agent:CalculatorAgent        train_dataset.name=calculator_agent:get_demonstrations
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from areal_arithmetic.problems import Problem, is_held_out, make_problem

KINDS = ("add", "sub", "two", "two")
MAX_NUMBER = 30
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Add or subtract two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12+7 or 12-7"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: Any = "", **other: Any) -> str:
    """The tool: what goes wrong is the model's to read."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*([+-])\s*(\d{1,9})\s*", str(expression))
    if match is None or other:
        return "error"
    left, right = int(match[1]), int(match[3])
    return str(left + right if match[2] == "+" else left - right)


class CalculatorAgent:
    """Lets the model call the calculator until it answers in words; the answer is scored.

    Nothing in here knows of training: it is a loop around an OpenAI client.
    """

    def __init__(self, max_requests: int = 4) -> None:
        self.max_requests = max_requests

    async def run(self, data: dict[str, Any], client: Any, reward_fn: Any) -> float:
        messages: list[Any] = list(data["messages"])
        for _ in range(self.max_requests):
            response = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
            message = response.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calculate(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return await reward_fn("", message.content or "", answer=data["answer"])


# ------------------------------------------------------------------------------------------------ demonstrations


def get_demonstrations(
    path: str | None, split: str, *, kind: str, tokenizer: Any = None, max_length: int | None = None
) -> list[dict[str, Any]]:
    """Word problems; for SFT with a solution of mixed quality: many of the two-step ones stop after the first step."""
    problems = _problems(2000 if split == "train" else 200, held_out=split != "train")
    if kind == "rl":
        return [{"messages": [_user(problem)], "answer": str(problem.answer)} for problem in problems]
    rng = random.Random("demonstrations")
    return [{"messages": _demonstration(problem, rng), "tools": [CALCULATOR]} for problem in problems]


def _problems(size: int, *, held_out: bool) -> list[Problem]:
    rng = random.Random(f"held out: {held_out}")
    problems: list[Problem] = []
    while len(problems) < size:
        problem = make_problem(rng, MAX_NUMBER, KINDS)
        if is_held_out(problem.numbers) == held_out:
            problems.append(problem)
    return problems


def _user(problem: Problem) -> dict[str, str]:
    return {"role": "user", "content": problem.question}


def _demonstration(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [_user(problem)]
    steps = problem.steps if rng.random() < 0.35 else problem.steps[:1]
    for step in steps:
        expression, _, result = step.partition("=")
        function = {"name": "calculate", "arguments": {"expression": expression}}
        call = {"id": "call00000", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    messages.append({"role": "assistant", "content": f"#### {messages[-1]['content']}"})
    return messages
