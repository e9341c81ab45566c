import numpy as np
import pytest
import reward_functions as rewards
from rollout_fakes import FakeEngine
from tiny_tokenizer import TEMPLATES, tiny_tokenizer

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.errors import BadInputError
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.workflows.multi_turn import MultiTurnWorkflow
from areal_core.rollout.workflows.rlvr import RLVRWorkflow

ROW = {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2", "_uid": "0-0", "_index": 0}
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=16)


class Reward:
    """Gives the rewards of a list, one a call, and keeps what it was called with."""

    def __init__(self, *rewards):
        self.rewards, self.calls = list(rewards), []

    async def __call__(self, prompt, completions, prompt_ids, completion_ids, **data):
        self.calls.append((prompt, completions, list(prompt_ids), list(completion_ids), data))
        return self.rewards.pop(0)


def answers(tokenizer, *texts):
    """An engine that answers with these texts in turn, token by token as the tokenizer writes them."""
    queue = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return FakeEngine(lambda request: queue.pop(0))


async def test_rlvr_when_answered_gives_prompt_completion_and_reward():
    tokenizer = tiny_tokenizer()
    engine, reward = answers(tokenizer, "two<|im_end|>"), Reward(0.5)

    trajectory = await RLVRWorkflow(GCONFIG, tokenizer, reward).arun_episode(EpisodeEngine(engine), dict(ROW))

    text = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    assert trajectory.input_ids.tolist() == prompt_ids + tokenizer.encode("two<|im_end|>", add_special_tokens=False)
    assert trajectory.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * 4
    assert trajectory.reward == 0.5
    assert trajectory.metadata == {"prompt": text, "completion": "two"}
    ((prompt, completion, seen_prompt_ids, completion_ids, data),) = reward.calls
    assert (prompt, completion) == ("user\n1+1?\nassistant\n", "two")
    assert seen_prompt_ids == prompt_ids and completion_ids == trajectory.input_ids[len(prompt_ids) :].tolist()
    assert data == {"messages": ROW["messages"], "answer": "2"}


async def test_rlvr_when_group_shares_a_cache_tokenises_the_prompt_once():
    tokenizer, cache = tiny_tokenizer(), {}
    engine = FakeEngine()
    workflow = RLVRWorkflow(GCONFIG, tokenizer, Reward(1.0, 1.0))

    for sample in range(2):
        await workflow.arun_episode(EpisodeEngine(engine, sample=sample, group_cache=cache), dict(ROW))

    assert engine.requests[0].input_ids is engine.requests[1].input_ids


async def test_rlvr_requests_when_sent_stop_at_eos_and_pad_and_ask_for_one_sample():
    tokenizer = tiny_tokenizer()
    engine = answers(tokenizer, "x")

    await RLVRWorkflow(GCONFIG, tokenizer, Reward(1.0)).arun_episode(EpisodeEngine(engine), dict(ROW))

    gconfig = engine.requests[0].gconfig
    assert gconfig.n_samples == 1
    assert gconfig.stop_token_ids == [tokenizer.eos_token_id, tokenizer.pad_token_id]


@pytest.mark.parametrize("workflow", [RLVRWorkflow, MultiTurnWorkflow])
def test_workflow_when_tokenizer_has_no_chat_template_says_so(workflow):
    with pytest.raises(BadInputError, match="no chat template"):
        workflow(GCONFIG, tiny_tokenizer(None), Reward())
    with pytest.raises(BadInputError, match="needs a tokenizer"):
        workflow(GCONFIG, None, Reward())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "_uid": "0-7"}, r"row 0-7 has no column 'messages' \(its columns: question\)"),
        ({"messages": "1+1?", "_uid": "0-7"}, r"row 0-7: 'messages' is '1\+1\?'"),
        ({"messages": [], "_uid": "0-7"}, "non-empty list"),
        ({"messages": [{"content": "x"}]}, "non-empty list"),
    ],
)
@pytest.mark.parametrize("workflow", [RLVRWorkflow, MultiTurnWorkflow])
async def test_workflow_when_row_has_no_chat_names_the_row(workflow, row, message):
    with pytest.raises(BadInputError, match=message):
        await workflow(GCONFIG, tiny_tokenizer(), Reward()).arun_episode(EpisodeEngine(FakeEngine()), row)


@pytest.mark.parametrize("workflow", [RLVRWorkflow, MultiTurnWorkflow])
async def test_workflow_when_prompt_leaves_no_room_says_so(workflow):
    gconfig = GCONFIG.new(max_tokens=10)

    with pytest.raises(BadInputError, match=r"gconfig\.max_tokens 10"):
        await workflow(gconfig, tiny_tokenizer(), Reward()).arun_episode(EpisodeEngine(FakeEngine()), dict(ROW))


async def test_rlvr_when_template_refuses_the_row_says_which():
    template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(BadInputError, match=r"cannot render dataset row 0-0: .*roles must alternate"):
        await RLVRWorkflow(GCONFIG, tiny_tokenizer(template), Reward()).arun_episode(
            EpisodeEngine(FakeEngine()), dict(ROW)
        )


# What each template puts between two turns, written out by hand.
BETWEEN = {
    "chatml": "{end}\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "{end}<|header|>user<|end_header|>\n\nno<|im_end|><|header|>assistant<|end_header|>\n\n",
    "llama2": "{end}<|begin|>[INST] no [/INST]",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("ended", [True, False], ids=["stopped", "truncated"])
async def test_multi_turn_when_wrong_extends_the_sampled_ids(name, ended):
    tokenizer = tiny_tokenizer(TEMPLATES[name])
    first_text = "3<|im_end|>" if ended else "I think that"
    engine, reward = answers(tokenizer, first_text, "2<|im_end|>"), Reward(0.0, 1.0)
    workflow = MultiTurnWorkflow(GCONFIG, tokenizer, reward, max_turns=3, turn_discount=0.5, feedback="no")

    trajectory = await workflow.arun_episode(EpisodeEngine(engine), dict(ROW))

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    # A truncated answer is ended by the template, as prompt: Llama 2's puts a blank before the end.
    end = "" if ended else (" <|im_end|>" if name == "llama2" else "<|im_end|>")
    prompt = tokenizer.apply_chat_template(ROW["messages"], add_generation_prompt=True, return_dict=False)
    parts = [(prompt, False), (encode(first_text), True), (encode(BETWEEN[name].format(end=end)), False)]
    parts.append((encode("2<|im_end|>"), True))
    assert trajectory.input_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert trajectory.loss_mask.tolist() == [trained for ids, trained in parts for _ in ids]
    np.testing.assert_array_equal(trajectory.versions, np.where(trajectory.loss_mask, 0, -1))
    assert trajectory.n_turns == 2
    assert trajectory.reward == 0.5
    assert trajectory.metadata["turn_rewards"] == [0.0, 1.0]
    assert [call[1] for call in reward.calls] == [first_text.removesuffix("<|im_end|>"), "2"]


async def test_multi_turn_when_sampled_ids_are_no_canonical_encoding_keeps_them():
    # "<|im_end|>" as bytes decodes to the text of the special token, but is not that token.
    tokenizer = tiny_tokenizer()
    spelled = [tokenizer.convert_tokens_to_ids(character) for character in "<|im_end|>"]
    engine = FakeEngine(lambda request: spelled)
    workflow = MultiTurnWorkflow(GCONFIG, tokenizer, Reward(0.0, 0.0), max_turns=2)

    trajectory = await workflow.arun_episode(EpisodeEngine(engine), dict(ROW))

    assert trajectory.input_ids[trajectory.loss_mask].tolist() == spelled * 2


async def test_multi_turn_when_right_at_once_stops_and_does_not_discount():
    tokenizer = tiny_tokenizer()
    engine = answers(tokenizer, "2<|im_end|>")

    trajectory = await MultiTurnWorkflow(GCONFIG, tokenizer, Reward(1.0)).arun_episode(EpisodeEngine(engine), dict(ROW))

    assert (trajectory.n_turns, trajectory.reward, len(engine.requests)) == (1, 1.0, 1)


async def test_multi_turn_when_the_third_answer_is_right_discounts_twice():
    tokenizer = tiny_tokenizer()
    engine = answers(tokenizer, "4<|im_end|>", "3<|im_end|>", "2<|im_end|>")
    workflow = MultiTurnWorkflow(GCONFIG, tokenizer, Reward(0.0, 0.0, 2.0), max_turns=4, turn_discount=0.5)

    trajectory = await workflow.arun_episode(EpisodeEngine(engine), dict(ROW))

    assert (trajectory.n_turns, trajectory.reward) == (3, 0.25 * 2.0)


async def test_multi_turn_when_context_is_used_up_ends_the_episode():
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.apply_chat_template(ROW["messages"], add_generation_prompt=True, return_dict=False)
    gconfig = GCONFIG.new(max_tokens=len(prompt) + 10)
    engine = answers(tokenizer, "3<|im_end|>")

    trajectory = await MultiTurnWorkflow(gconfig, tokenizer, Reward(0.25), success_threshold=0.5).arun_episode(
        EpisodeEngine(engine), dict(ROW)
    )

    assert (trajectory.n_turns, trajectory.reward) == (1, 0.25)


async def test_multi_turn_when_template_hides_answers_says_so():
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    engine = answers(tokenizer, "3<|im_end|>")

    with pytest.raises(BadInputError, match="does not show the assistant's answers"):
        await MultiTurnWorkflow(GCONFIG, tokenizer, Reward(0.0)).arun_episode(EpisodeEngine(engine), dict(ROW))


@pytest.mark.parametrize("workflow", [RLVRWorkflow, MultiTurnWorkflow])
async def test_workflow_when_made_by_hand_takes_a_plain_reward_function(workflow):
    tokenizer = tiny_tokenizer()
    made = workflow(GCONFIG, tokenizer, rewards.length_reward_fn)

    try:
        trajectory = await made.arun_episode(EpisodeEngine(answers(tokenizer, "two<|im_end|>")), dict(ROW))
    finally:
        made.reward_fn.destroy()

    assert trajectory.reward == 3.0
