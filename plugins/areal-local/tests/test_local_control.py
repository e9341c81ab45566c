"""Pause, cancellation, crashes and the end of an engine."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.errors import ArealError

LONG = GenerationHyperparameters(max_new_tokens=240, ignore_eos=True, seed=0)


def request(prompt=(1, 2, 3), gconfig=LONG):
    return ModelRequest(input_ids=list(prompt), gconfig=gconfig)


class Gate:
    """Counts steps of a loop and can hold the thread inside one."""

    def __init__(self, engine):
        self.loop = engine._loop
        self.steps = self.completed = 0
        self.block_at = None
        self.reached = threading.Event()
        self.open = threading.Event()
        self._step = self.loop._step
        self.loop._step = self.step

    def step(self):
        self.steps += 1
        if self.steps == self.block_at:
            self.reached.set()
            self.open.wait(30)
        self._step()
        self.completed += 1


async def wait_for(event):
    await asyncio.to_thread(event.wait, 30)
    assert event.is_set()


async def test_pause_when_a_step_runs_returns_only_after_it(model, make_engine):
    engine = make_engine(model)
    gate = Gate(engine)
    gate.block_at = 5
    task = asyncio.ensure_future(engine.agenerate(request()))
    await wait_for(gate.reached)

    def pause():
        engine.pause_generation()
        return gate.completed

    pausing = asyncio.ensure_future(asyncio.to_thread(pause))
    while not engine._loop._paused:
        await asyncio.sleep(0)
    gate.open.set()

    assert await pausing == 5
    assert gate.steps == 5
    assert not task.done()
    engine.continue_generation()
    assert (await task).output_len == 240


async def test_requests_when_submitted_while_paused_start_together_in_order(model, make_engine):
    engine = make_engine(model)
    engine.pause_generation()
    tasks = [asyncio.ensure_future(engine.agenerate(request(prompt=[i]))) for i in range(20)]
    await asyncio.sleep(0)
    gate = Gate(engine)
    gate.block_at = 2

    engine.continue_generation()
    await wait_for(gate.reached)

    prompts = [pending.request.input_ids for pending in engine._loop.rows.requests]
    assert prompts == [[i] for i in range(20)]
    gate.open.set()
    await asyncio.gather(*tasks)


async def test_update_when_paused_leaves_it_paused(make_model, make_engine):
    engine = make_engine(make_model("qwen3"))
    gate = Gate(engine)
    engine.pause_generation()

    engine.update_weights_from_memory(make_model("qwen3", seed=1).named_parameters(), 1)

    assert engine._loop._paused
    task = asyncio.ensure_future(engine.agenerate(request(gconfig=LONG.new(max_new_tokens=2))))
    await asyncio.sleep(0)
    assert (gate.steps, task.done()) == (0, False)
    engine.continue_generation()
    assert (await task).output_versions == [1, 1]


async def test_cancel_when_storming_frees_rows_and_spares_the_others(model, make_engine):
    engine = make_engine(model, max_batch_size=8)
    alone = await engine.agenerate(request(gconfig=LONG.new(max_new_tokens=30)))
    tasks = [
        asyncio.ensure_future(engine.agenerate(request(gconfig=LONG.new(max_new_tokens=30, seed=0 if i % 3 else i))))
        for i in range(60)
    ]
    await asyncio.sleep(0)
    for i, task in enumerate(tasks):
        if i % 3 == 0:
            task.cancel()
        if i % 10 == 0:
            await asyncio.sleep(0)

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(a, asyncio.CancelledError) for a in answers[::3])
    for i, answer in enumerate(answers):
        if i % 3:
            assert answer.output_tokens == alone.output_tokens
    stats = engine.export_stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


async def test_cancel_when_running_frees_the_row_before_the_next_step(model, make_engine):
    engine = make_engine(model, max_batch_size=1)
    gate = Gate(engine)
    gate.block_at = 4
    first = asyncio.ensure_future(engine.agenerate(request()))
    await wait_for(gate.reached)
    second = asyncio.ensure_future(engine.agenerate(request(prompt=[9], gconfig=LONG.new(max_new_tokens=2))))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    gate.open.set()

    # Steps 4 (the cancelled row's last), then a prefill and a decode of the second.
    assert (await second).output_len == 2
    assert gate.steps == 6


async def test_crash_when_in_the_thread_fails_every_call_with_it(model, make_engine):
    engine = make_engine(model, max_batch_size=2)
    gate = Gate(engine)
    gate.block_at = 3
    tasks = [asyncio.ensure_future(engine.agenerate(request())) for _ in range(5)]
    await wait_for(gate.reached)
    boom = ZeroDivisionError("inside a kernel")

    def fail(*args):
        raise boom

    engine._loop.decoder.decode = fail
    gate.open.set()

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert answers == [boom] * 5
    with pytest.raises(ZeroDivisionError):
        await engine.agenerate(request())
    with pytest.raises(ZeroDivisionError):
        engine.pause_generation()
    with pytest.raises(ZeroDivisionError):
        engine.continue_generation()
    with pytest.raises(ZeroDivisionError):
        engine.update_weights_from_memory([], 1)
    engine.destroy()
    engine.destroy()


async def test_logits_when_not_finite_are_an_error_not_tokens(model, make_engine):
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    engine = make_engine(model, slow_decoder=True)

    with pytest.raises(ArealError, match="not finite"):
        await engine.agenerate(request())


@pytest.mark.parametrize("paused", [False, True])
async def test_destroy_when_requests_run_ends_them_with_abort_and_joins(paused, model, make_engine):
    engine = make_engine(model, max_batch_size=2)
    gate = Gate(engine)
    gate.block_at = 4
    thread = engine._loop._thread
    tasks = [asyncio.ensure_future(engine.agenerate(request())) for _ in range(4)]
    await wait_for(gate.reached)
    gate.open.set()
    if paused:
        await asyncio.to_thread(engine.pause_generation)

    await asyncio.to_thread(engine.destroy)
    answers = await asyncio.gather(*tasks)

    assert {answer.stop_reason for answer in answers} == {"abort"}
    assert answers[0].output_len >= 2
    assert answers[3].output_len == 0
    assert not thread.is_alive()
    engine.destroy()
    with pytest.raises(ArealError, match="destroyed"):
        await engine.agenerate(request())


def test_results_when_the_callers_event_loop_is_gone_do_not_stop_the_engine(model, make_engine, generate):
    engine = make_engine(model)

    async def abandon():
        asyncio.ensure_future(engine.agenerate(request()))  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(0)

    asyncio.run(abandon())
    loop = asyncio.new_event_loop()
    engine.pause_generation()
    pending = loop.create_task(engine.agenerate(request(gconfig=LONG.new(max_new_tokens=2))))
    loop.run_until_complete(asyncio.sleep(0))
    pending._log_destroy_pending = False
    loop.close()
    engine.continue_generation()

    (answer,) = generate(engine, [([1], {})], max_new_tokens=3)

    assert answer.output_len == 3


async def test_agenerate_when_called_from_two_event_loops_answers_both(model, make_engine):
    engine = make_engine(model)

    def other():
        return asyncio.run(engine.agenerate(request(gconfig=LONG.new(max_new_tokens=20))))

    here, there = await asyncio.gather(
        engine.agenerate(request(gconfig=LONG.new(max_new_tokens=20))), asyncio.to_thread(other)
    )

    assert here.output_tokens == there.output_tokens


async def test_export_stats_when_called_twice_counts_since_the_last_call(model, make_engine):
    engine = make_engine(model)
    await engine.agenerate(request(gconfig=LONG.new(max_new_tokens=10)))
    # The counters of a step are complete once its thread waits again.
    engine.pause_generation()

    first, second = engine.export_stats(), engine.export_stats()

    assert first["generated_tokens"] == 10
    assert first["prefill_tokens"] == 3
    assert first["decode_steps"] == 9
    assert first["finished"] == 1
    assert first["tokens_per_second"] > 0
    assert second["generated_tokens"] == second["tokens_per_second"] == 0
