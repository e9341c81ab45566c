"""Dialogues with tools under the chat templates that models really have."""

import json

import pytest
from agent_fakes import ADD, END, make_session, message_of, spelled, user
from chat_templates import GEMMA, LLAMA31, MISTRAL, QWEN3, QWEN25
from tiny_tokenizer import tiny_tokenizer

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": %d, "b": %d}}'


def result(call, content):
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


async def play(session, *, n_calls=1, system=True, **fields):
    """A question, calls of tools twice, an answer, and a second question with its answer; returns the messages."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages.append(user("1+2+3?"))
    for turn in range(4):
        answer = await session.create({"messages": messages, "tools": [ADD], **fields})
        message = message_of(answer)
        messages.append(message)
        if turn < 2:
            assert len(message["tool_calls"]) == n_calls
            messages += [result(call, str(number)) for number, call in enumerate(message["tool_calls"])]
        elif turn == 2:
            messages.append(user("Sure?"))
    return messages


def for_template(messages):
    """As a template takes them: arguments parsed, no content that is None."""
    made = []
    for message in messages:
        message = {**message, "content": message["content"] or ""}
        message.pop("refusal", None)
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                for c in message["tool_calls"]
            ]
        made.append(message)
    return made


def prompts(session, tokenizer):
    return [tokenizer.decode(c.prompt_ids, skip_special_tokens=False) for c in session.completions.values()]


@pytest.mark.parametrize("n_calls", [1, 2])
@pytest.mark.parametrize("template", [QWEN25, QWEN3])
async def test_qwen_when_tools_are_called_prompts_are_what_the_template_writes(template, n_calls):
    tokenizer = tiny_tokenizer(template)
    call = "\n".join(HERMES % (number, 2) for number in range(n_calls)) + END
    session, _ = make_session(call, call, "6" + END, "Yes." + END, tokenizer=tokenizer)

    messages = await play(session, n_calls=n_calls)

    # The template itself, over all that was said: here it writes what the model had written.
    rendered = tokenizer.apply_chat_template(
        for_template(messages[:-1]), tools=[ADD], add_generation_prompt=True, tokenize=False
    )
    assert session.stats["branches"] == 0
    assert prompts(session, tokenizer)[-1] == rendered


async def test_qwen3_when_it_thinks_keeps_its_thoughts_as_context_and_ends_turns_as_the_template_does():
    tokenizer = tiny_tokenizer(QWEN3)
    call = "<think>\nadd first\n</think>\n\n" + HERMES % (1, 2) + END
    answers = [call, call, "<think>\ndone\n</think>\n\n6" + END, "<think>\n\n</think>\n\nYes." + END]
    session, _ = make_session(*answers, tokenizer=tokenizer)

    await play(session)

    response = "\n<|im_start|>user\n<tool_response>\n0\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    written = prompts(session, tokenizer)
    assert session.stats["branches"] == 0
    assert written[1] == written[0] + call + response
    assert written[2] == written[1] + call + response
    assert written[3] == written[2] + answers[2] + "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


async def test_qwen3_when_thinking_is_off_begins_every_answer_with_an_empty_thought():
    tokenizer = tiny_tokenizer(QWEN3)
    session, _ = make_session(HERMES % (1, 2) + END, HERMES % (1, 2) + END, "6" + END, "Y" + END, tokenizer=tokenizer)

    await play(session, chat_template_kwargs={"enable_thinking": False})

    assert all(text.endswith("assistant\n<think>\n\n</think>\n\n") for text in prompts(session, tokenizer))
    assert session.stats["branches"] == 0


async def test_llama31_when_tools_are_called_prompts_are_what_the_template_writes():
    tokenizer = tiny_tokenizer(LLAMA31)
    call = LLAMA % (1, 2) + END
    session, _ = make_session(call, call, "6" + END, "Yes." + END, tokenizer=tokenizer, tool_call_parser="llama3_json")

    messages = await play(session)

    rendered = tokenizer.apply_chat_template(
        for_template(messages[:-1]), tools=[ADD], add_generation_prompt=True, tokenize=False
    )
    assert session.stats["branches"] == 0 and prompts(session, tokenizer)[-1] == rendered


async def test_mistral_when_tools_stand_before_the_last_question_extends_what_was_sampled():
    tokenizer = tiny_tokenizer(MISTRAL)
    call = HERMES % (1, 2) + END
    session, _ = make_session(call, call, "6" + END, "Yes." + END, tokenizer=tokenizer, tool_call_parser="hermes")

    await play(session, system=False)

    written = prompts(session, tokenizer)
    assert session.stats["branches"] == 0
    assert written[1] == written[0] + call + '[TOOL_RESULTS]{"content": "0"}[/TOOL_RESULTS]'
    assert written[3].startswith(written[2] + "6" + END + "[AVAILABLE_TOOLS]")


@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA31])
async def test_templates_when_an_answer_was_cut_off_close_its_turn(template):
    tokenizer = tiny_tokenizer(template)
    session, _ = make_session(
        spelled(tokenizer, "<think>\nwell"), "b" + END, tokenizer=tokenizer, stop_reasons=["length", "stop"]
    )
    answer = await session.create({"messages": [user("?")]})

    await session.create({"messages": [user("?"), message_of(answer), user("go on")]})

    first, second = prompts(session, tokenizer)
    assert second.startswith(first + "<think>\nwell" + END) and second.count("well") == 1


async def test_qwen3_when_an_example_has_a_thought_shows_it_to_the_model():
    tokenizer = tiny_tokenizer(QWEN3)
    session, _ = make_session("a" + END, tokenizer=tokenizer)
    example = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}

    await session.create({"messages": [user("2+2?"), example, {"role": "tool", "content": "4"}]})

    assert "<think>\ntwo and two\n</think>\n\n4<|im_end|>" in prompts(session, tokenizer)[0]


async def test_gemma_when_the_engine_ends_turns_by_a_token_of_its_own_does_not_end_them_twice():
    tokenizer = tiny_tokenizer(GEMMA)
    end = "<|end_header|>"
    session, _ = make_session("a" + end, "b" + end, tokenizer=tokenizer)
    answer = message_of(await session.create({"messages": [user("?")]}))

    await session.create({"messages": [user("?"), answer, user("!")]})

    first, second = prompts(session, tokenizer)
    assert (
        answer["content"] == "a" and second == first + "a" + end + "\n<|header|>user\n!" + end + "\n<|header|>model\n"
    )


async def test_gemma_when_an_answer_is_cut_off_at_a_special_token_ends_its_turn():
    tokenizer = tiny_tokenizer(GEMMA)
    session, _ = make_session("a<|header|>", "b", tokenizer=tokenizer, stop_reasons=["length", "stop"])
    answer = message_of(await session.create({"messages": [user("?")]}))

    await session.create({"messages": [user("?"), answer, user("!")]})

    first, second = prompts(session, tokenizer)
    assert second.startswith(first + "a<|header|><|end_header|>\n")
