"""From completions to rewards and trajectories."""

import random

import numpy as np
import pytest
from agent_fakes import END, make_session, message_of, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from areal_core.api.io_struct import ModelResponse
from areal_core.api.reward_api import Score
from areal_core.rollout.agents.completions import Completion, chosen, returns
from areal_core.rollout.agents.export import export_concat, export_individual

TOKENIZER = tiny_tokenizer()


class Tree:
    """Completions with ids of their own; no two sampled tokens have the same log-prob."""

    def __init__(self):
        self.completions: list[Completion] = []
        self._token = 0

    def add(self, parent=None, reward=None, *, n=1, index=0, order=None, output=2, name=None):
        order = len(self.completions) if order is None else order
        before = [] if parent is None else [*parent.prompt_ids, *parent.output_ids]
        prompt = [*before, *self._tokens(2)]
        ids = self._tokens(output)
        response = ModelResponse(
            input_tokens=prompt,
            output_tokens=ids,
            output_logprobs=[-token / 1000 for token in ids],
            output_versions=[order] * len(ids),
        )
        completion = Completion(
            id=name or f"c{order}" + (f"#{index}" if index else ""),
            request_id=f"c{order}",
            order=order,
            index=index,
            n=n,
            messages=[],
            message={"role": "assistant", "content": ""},
            tool_calls=[],
            finish_reason="stop",
            response=response,
            parent=parent,
            reward=reward,
        )
        if parent is not None:
            parent.children.append(completion)
        self.completions.append(completion)
        return completion

    def _tokens(self, count):
        start, self._token = self._token, self._token + count
        return [token % 250 for token in range(start, start + count)]


def values(tree, discount):
    return dict(returns(chosen(tree.completions), discount))


def test_returns_when_a_chain_discount_backwards():
    tree = Tree()
    a = tree.add(reward=1.0)
    b = tree.add(a)
    tree.add(b, reward=4.0)

    # R2 = 4; R1 = 0 + 0.5 * 4; R0 = 1 + 0.5 * 2
    assert values(tree, 0.5) == {"c0": 2.0, "c1": 2.0, "c2": 4.0}
    assert values(tree, 0.0) == {"c0": 1.0, "c1": 0.0, "c2": 4.0}


def test_returns_when_a_turn_has_two_continuations_takes_their_mean():
    tree = Tree()
    a = tree.add()
    tree.add(a, reward=1.0)
    tree.add(a, reward=3.0)

    assert values(tree, 0.5) == {"c0": 1.0, "c1": 1.0, "c2": 3.0}


def test_returns_when_history_was_edited_go_on_to_the_next_request():
    tree = Tree()
    tree.add()  # its chat was edited: the next request is another root
    tree.add(reward=0.25)  # as was this one's, but it has a reward of its own
    tree.add()
    tree.add(reward=2.0)

    assert values(tree, 0.5) == {"c0": 0.125, "c1": 0.25, "c2": 1.0, "c3": 2.0}


def test_chosen_when_several_choices_keeps_what_came_back_or_was_rewarded():
    tree = Tree()
    choices = [tree.add(n=4, index=i, order=0) for i in range(4)]
    tree.add(choices[2], reward=1.0)
    choices[3].reward = 0.0

    assert [completion.id for completion in chosen(tree.completions)] == ["c0#2", "c0#3", "c4"]


def test_individual_when_exported_trains_each_answer_with_its_return():
    tree = Tree()
    a = tree.add(reward=1.0)
    b = tree.add(a, reward=4.0)

    first, second = export_individual(tree.completions, 0.5, TOKENIZER)

    for trajectory, completion, reward in ((first, a, 3.0), (second, b, 4.0)):
        prompt, output = completion.prompt_ids, completion.output_ids
        assert trajectory.input_ids.tolist() == prompt + output
        assert trajectory.loss_mask.tolist() == [False] * len(prompt) + [True] * len(output)
        assert trajectory.reward == reward
        np.testing.assert_allclose(trajectory.logprobs[trajectory.loss_mask], completion.logprobs, rtol=1e-6)
        assert trajectory.metadata["completion_ids"] == [completion.id]


def test_concat_when_a_chain_is_one_trajectory_with_its_discounted_return():
    tree = Tree()
    a = tree.add(reward=1.0)
    b = tree.add(a)
    c = tree.add(b, reward=4.0)

    (trajectory,) = export_concat(tree.completions, 0.5, TOKENIZER)

    assert trajectory.input_ids.tolist() == c.prompt_ids + c.output_ids
    assert trajectory.input_ids[trajectory.loss_mask].tolist() == a.output_ids + b.output_ids + c.output_ids
    assert trajectory.reward == 1.0 + 0.5 * 0.0 + 0.25 * 4.0
    assert trajectory.n_turns == 3
    assert trajectory.metadata["turn_rewards"] == [1.0, None, 4.0]


def test_concat_when_leaves_share_a_turn_trains_it_with_the_first():
    tree = Tree()
    a = tree.add(reward=1.0)
    b = tree.add(a, reward=2.0)
    c = tree.add(a, reward=8.0)

    first, second = export_concat(tree.completions, 0.5, TOKENIZER)

    assert first.input_ids[first.loss_mask].tolist() == a.output_ids + b.output_ids
    assert first.reward == 1.0 + 0.5 * 2.0
    assert second.input_ids.tolist() == c.prompt_ids + c.output_ids
    assert second.input_ids[second.loss_mask].tolist() == c.output_ids
    assert second.reward == 8.0
    shared = ~second.loss_mask
    assert not second.logprobs[shared].any() and (second.versions[shared] == -1).all()
    assert second.metadata["completion_ids"] == [c.id]


@pytest.mark.parametrize("export", [export_concat, export_individual])
def test_export_when_reward_is_a_score_keeps_its_terms(export):
    tree = Tree()
    a = tree.add()
    tree.add(a, reward=Score(1.5, {"right": 1.0, "brief": 0.5}))

    *_, last = export(tree.completions, 1.0, TOKENIZER)

    assert last.reward == 1.5 and last.rewards == {"right": 1.0, "brief": 0.5}


@pytest.mark.parametrize("export", [export_concat, export_individual])
def test_export_when_an_answer_has_no_tokens_trains_nothing_of_it(export):
    tree = Tree()
    tree.add(reward=1.0, output=0)

    assert export(tree.completions, 1.0, TOKENIZER) == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 12))
def test_exports_when_tree_is_random_train_every_chosen_token_exactly_once(seed, size):
    # Arrange: random parents (or none), some requests with two choices, random rewards
    rng, tree = random.Random(seed), Tree()
    order = 0
    while len(tree.completions) < size:
        parent = rng.choice([None, *tree.completions])
        n = rng.choice([1, 1, 2])
        for index in range(n):
            reward = rng.choice([None, None, float(rng.randint(-3, 3))])
            tree.add(parent, reward, n=n, index=index, order=order)
        order += 1
    kept = chosen(tree.completions)
    expected = sorted(logprob for completion in kept for logprob in np.float32(completion.logprobs).tolist())
    by_logprob = {float(np.float32(lp)): c for c in kept for lp in c.logprobs}
    discount = rng.choice([0.0, 0.5, 1.0])
    value = returns(kept, discount)

    for export in (export_concat, export_individual):
        # Act
        trajectories = export(tree.completions, discount, TOKENIZER)

        # Assert: exactly the sampled tokens, each once, with the version and the text around it
        trained = np.concatenate([t.logprobs[t.loss_mask] for t in trajectories]) if trajectories else []
        assert sorted(np.asarray(trained).tolist()) == expected
        for trajectory in trajectories:
            owners = {by_logprob[lp].id: by_logprob[lp] for lp in trajectory.logprobs[trajectory.loss_mask].tolist()}
            for owner in owners.values():
                whole = owner.prompt_ids + owner.output_ids
                assert trajectory.input_ids[: len(whole)].tolist() == whole
                positions = range(len(owner.prompt_ids), len(whole))
                assert all(trajectory.loss_mask[i] and trajectory.versions[i] == owner.order for i in positions)
            assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
            # The reward, from the definition: along the path of what is trained, to the last one's return.
            path = sorted(owners.values(), key=lambda c: len(c.prompt_ids))
            reward = sum(discount**i * (c.reward or 0.0) for i, c in enumerate(path[:-1]))
            reward += discount ** (len(path) - 1) * value[path[-1].id]
            assert trajectory.reward == pytest.approx(reward, rel=1e-12, abs=1e-12)


async def test_concat_when_recorded_by_a_session_is_what_the_engine_saw():
    session, engine = make_session("a" + END, "b" + END, "c" + END)
    first = message_of(await session.create({"messages": [user("?")]}))
    await session.create({"messages": [user("?"), first, user("!")]})
    await session.create({"messages": [user("other")]})
    session.set_last_reward(1.0)

    one, two = export_concat(list(session.completions.values()), 0.5, session.settings.tokenizer)

    responses = engine.responses
    assert one.input_ids.tolist() == responses[1].input_tokens + responses[1].output_tokens
    assert two.input_ids.tolist() == responses[2].input_tokens + responses[2].output_tokens
    assert (one.reward, two.reward) == (0.25, 1.0)
    trained = np.concatenate([one.logprobs[one.loss_mask], two.logprobs[two.loss_mask]])
    np.testing.assert_allclose(trained, [lp for r in responses for lp in r.output_logprobs], rtol=1e-6)
