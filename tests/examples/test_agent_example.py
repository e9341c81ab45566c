"""The calculator agent of examples/agent: its tool, its demonstrations, and what the agent makes of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from areal_core.api.io_struct import GenerationHyperparameters, ModelResponse
from areal_core.data.sft import encode_example
from areal_core.rollout.agents.workflow import AgentRunner

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("calculator_agent")
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def tokenizer(example):
    return importlib.import_module("prepare_model").train_tokenizer()


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12+7", "19"), (" 3 - 5 ", "-2"), ("2*3", "error"), ("__import__('os')", "error"), (7, "error"), ("", "error")],
)
def test_calculator_when_called_computes_or_says_error(example, expression, result):
    assert example.calculate(expression) == result


def test_demonstrations_when_made_are_disjoint_and_fit_the_context(example, tokenizer):
    train, test = (example.get_demonstrations(None, split, kind="sft") for split in ("train", "test"))

    questions = [{row["messages"][0]["content"] for row in rows} for rows in (train, test)]
    assert not questions[0] & questions[1]
    lengths = [len(encode_example(row, tokenizer)["input_ids"]) for row in train[:200]]
    assert max(lengths) + 40 <= 256


async def test_agent_when_the_model_writes_a_demonstration_sees_its_very_tokens(example, tokenizer):
    # Arrange: an engine that answers with what the demonstrations' loss mask marks, turn by turn
    row = next(row for row in example.get_demonstrations(None, "train", kind="sft") if len(row["messages"]) == 6)
    encoded = encode_example(row, tokenizer)
    ids, mask = encoded["input_ids"].tolist(), encoded["loss_mask"].tolist()
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    seen = []

    class Engine:
        async def agenerate(self, request):
            start = len(request.input_ids)
            seen.append(start)
            assert request.input_ids == ids[:start]
            end = next(i for i in range(start, len(ids) + 1) if i == len(ids) or not mask[i])
            output = ids[start:end]
            return ModelResponse(
                input_tokens=request.input_ids,
                output_tokens=output,
                output_logprobs=[-1.0] * len(output),
                output_versions=[0] * len(output),
            )

    async def reward(prompt, completion, answer):
        return float(completion == f"#### {answer}")

    runner = AgentRunner(example.CalculatorAgent(), GenerationHyperparameters(), tokenizer, reward)
    answer = row["messages"][-1]["content"].removeprefix("#### ")

    # Act
    (trajectory,) = await runner.arun_episode(Engine(), {"messages": row["messages"][:1], "answer": answer})

    # Assert
    assert seen == starts and len(starts) == 3
    length = len(trajectory)
    assert trajectory.input_ids.tolist() == ids[:length] and trajectory.loss_mask.tolist() == mask[:length]
    assert trajectory.reward == 1.0 and not any(mask[length:])
