"""Generation in a process of its own: equal results, one clear error where it dies, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core.api.configs import InferenceEngineConfig
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.errors import ArealError, BadInputError
from areal_local.config import LocalConfig
from areal_local.engine import LocalEngine
from areal_local.process import GenerationProcessError
from areal_local.shared_weights import SharedWeights, create_segment
from areal_local.wire import FrameReader, frame

PROMPT = [3, 1, 4, 1, 5]
LONG = GenerationHyperparameters(max_new_tokens=240, ignore_eos=True, seed=0)


@pytest.fixture
def engine(hosts, make_model):
    engine = hosts("process")
    engine.update_weights_from_memory(make_model("qwen3").named_parameters(), 0)
    return engine


def byte_tokenizer():
    """Token ``i`` below 97 is one printable character."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:97])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def essence(answers):
    return [(a.input_tokens, a.output_tokens, a.output_logprobs, a.output_versions, a.stop_reason) for a in answers]


# -------------------------------------------------------------------------------------------------- equal results


def test_answers_when_in_a_process_equal_those_of_a_thread_bit_for_bit(hosts, make_model, generate):
    kinds = [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"greedy": True, "frequency_penalty": 1.5},
        {"stop_token_ids": [*range(0, 97, 4), 10**9], "min_new_tokens": 3},
        {"max_tokens": 12},
    ]
    jobs = [([1 + i % 7, 2, 3 + i], {"seed": 2**40 + i, "max_new_tokens": 6 + i, **kinds[i % 5]}) for i in range(25)]
    answers = {}

    for mode in ("thread", "process"):
        engine = hosts(mode)
        engine.update_weights_from_memory(make_model("qwen3", seed=5).named_parameters(), 3)
        engine.export_stats()
        answers[mode] = generate(engine, jobs)
        stats = engine.export_stats()
        assert (stats["finished"], stats["running"], stats["waiting"]) == (25, 0, 0)

    assert essence(answers["process"]) == essence(answers["thread"])
    assert {answer.stop_reason for answer in answers["process"]} == {"stop", "length"}
    assert all(0 < answer.ttft <= answer.latency for answer in answers["process"])


def test_seeds_when_requests_bring_none_are_those_of_a_thread(hosts, make_model, start, generate):
    jobs = [(PROMPT, {})] * 6
    process = hosts("process")
    process.update_weights_from_memory(make_model("qwen3").named_parameters(), 0)
    process._seeds.seed(process.options.seed)

    in_process = generate(process, jobs, max_new_tokens=8)
    in_thread = generate(start(max_batch_size=4), jobs, max_new_tokens=8)

    assert essence(in_process) == essence(in_thread)
    assert len({tuple(answer.output_tokens) for answer in in_process}) > 1


def test_stop_strings_when_in_a_process_end_the_answer(engine, generate, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tokenizer = engine.tokenizer = byte_tokenizer()
    (free,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=20)
    text = tokenizer.decode(free.output_tokens)
    stop = text[8:11]

    answers = generate(
        engine,
        [(PROMPT, {"stop": ["ABSENT", stop]}), (PROMPT, {"stop": ["ABSENT"]}), (PROMPT, {"stop": [stop]})],
        greedy=True,
        max_new_tokens=20,
    )

    assert len(text) == 20
    assert answers[0].output_tokens == answers[2].output_tokens == free.output_tokens[: text.index(stop) + 3]
    assert [answer.stop_reason for answer in answers] == ["stop", "length", "stop"]
    # The folder that the tokenizer travelled in, once, is gone.
    assert list(tmp_path.iterdir()) == []


def test_stop_strings_when_the_tokenizer_cannot_travel_are_an_error(engine, generate):
    class Decoder:
        def decode(self, ids, skip_special_tokens=False):
            return ""

    engine.tokenizer = Decoder()

    with pytest.raises(BadInputError, match=r"stop_token_ids.*process=false"):
        generate(engine, [(PROMPT, {"stop": ["x"]})])

    assert generate(engine, [(PROMPT, {})], max_new_tokens=2)[0].output_len == 2


def test_request_when_it_can_never_work_is_refused_before_it_is_sent(engine, generate):
    with pytest.raises(BadInputError, match="vocabulary of 97"):
        generate(engine, [([97], {})])
    with pytest.raises(BadInputError, match="the context is 256"):
        generate(engine, [([1] * 256, {})])


async def test_cancel_when_storming_frees_rows_and_spares_the_others(engine):
    gconfig = LONG.new(max_new_tokens=30)
    alone = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig))
    tasks = [
        asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig))) for _ in range(40)
    ]
    await asyncio.sleep(0)
    for i, task in enumerate(tasks):
        if i % 3 == 0:
            task.cancel()
        if i % 10 == 0:
            await asyncio.sleep(0)

    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::3])
    assert all(a.output_tokens == alone.output_tokens for i, a in enumerate(answers) if i % 3)
    stats = engine.export_stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


async def test_pause_when_requests_run_computes_no_token(engine):
    tasks = [asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=LONG))) for _ in range(2)]
    short = LONG.new(max_new_tokens=3)
    await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=short))

    engine.pause_generation()
    engine.export_stats()
    waiting = asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=short)))
    await asyncio.sleep(0)
    stats = engine.export_stats()

    assert (stats["generated_tokens"], stats["decode_steps"]) == (0, 0)
    assert not any(task.done() for task in (*tasks, waiting))
    engine.continue_generation()
    assert [answer.output_len for answer in await asyncio.gather(*tasks, waiting)] == [240, 240, 3]


async def test_agenerate_when_called_from_two_event_loops_answers_both(engine):
    gconfig = LONG.new(max_new_tokens=20)

    def other():
        return asyncio.run(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig)))

    here, there = await asyncio.gather(
        engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig)), asyncio.to_thread(other)
    )

    assert here.output_tokens == there.output_tokens


def test_offload_when_undone_goes_on(engine, generate):
    before = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=6)

    engine.offload()
    engine.onload()

    assert essence(generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=6)) == essence(before)


def test_signals_when_meant_for_the_trainer_are_ignored(engine, generate):
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine._host.pid, signum)

    assert generate(engine, [(PROMPT, {})], max_new_tokens=3)[0].output_len == 3


def test_version_when_set_marks_the_next_tokens(engine, generate):
    engine.set_version(11)

    (answer,) = generate(engine, [(PROMPT, {})], max_new_tokens=3)

    assert answer.output_versions == [11] * 3


@pytest.mark.slow
def test_logits_when_not_finite_are_an_error_of_every_later_call(start, make_model, generate):
    engine = start(process=True)
    broken = make_model("qwen3")
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    engine.update_weights_from_memory(broken.named_parameters(), 1)

    with pytest.raises(ArealError, match="not finite"):
        generate(engine, [(PROMPT, {})])

    with pytest.raises(ArealError, match="not finite"):
        engine.pause_generation()
    engine.destroy()


# ----------------------------------------------------------------------------------------------- starts and ends


def test_initialize_when_the_folder_is_bad_is_the_same_error_and_leaves_no_process(start, tmp_path):
    before = set(psutil.Process().children())

    with pytest.raises(BadInputError, match="nothing-here"):
        start(tmp_path / "nothing-here", process=True)

    assert set(psutil.Process().children()) == before


def test_from_model_when_a_process_is_asked_for_is_an_error(model, make_engine):
    with pytest.raises(BadInputError, match=r"rollout\.local\.process"):
        make_engine(model, process=True)


@pytest.mark.slow
def test_initialize_when_the_import_path_holds_no_text_starts_a_process(start, generate, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", tmp_path, *sys.path])

    engine = start(process=True)

    assert len(generate(engine, [(PROMPT, {})], max_new_tokens=3)[0].output_tokens) == 3


def test_initialize_when_it_takes_too_long_is_an_error_and_leaves_no_process():
    before = set(psutil.Process().children())
    config = InferenceEngineConfig(setup_timeout=0.01, plugin_options={"local": LocalConfig(process=True)})

    with pytest.raises(ArealError, match=r"0\.01 s .rollout\.setup_timeout"):
        LocalEngine(config).initialize("anything")

    assert set(psutil.Process().children()) == before


@pytest.mark.slow
async def test_destroy_when_requests_run_ends_them_with_abort_and_the_process(start):
    engine = start(process=True, max_batch_size=2)
    child = psutil.Process(engine._host.pid)
    tasks = [asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=LONG))) for _ in range(4)]
    await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=LONG.new(max_new_tokens=1)))

    await asyncio.to_thread(engine.destroy)
    answers = await asyncio.gather(*tasks)

    assert "abort" in {answer.stop_reason for answer in answers}
    assert all(answer.output_len == len(answer.output_versions) for answer in answers)
    assert not child.is_running()
    engine.destroy()
    with pytest.raises(ArealError, match="destroyed"):
        await engine.agenerate(ModelRequest(input_ids=PROMPT))


@pytest.mark.slow
def test_process_when_it_crashes_fails_its_requests_and_is_replaced(start, make_model, generate):
    engine = start(process=True)
    new = make_model("qwen3", seed=1)
    engine.update_weights_from_memory(new.named_parameters(), 7)
    engine.set_version(8)
    (expected,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)
    first = psutil.Process(engine._host.pid)

    async def crash():
        engine.pause_generation()
        tasks = [
            asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=LONG))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        first.send_signal(signal.SIGSEGV)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = asyncio.run(crash())

    assert len({str(error) for error in errors}) == 1
    assert type(errors[0]) is GenerationProcessError
    for word in (str(first.pid), "SIGSEGV", "Fatal Python error", "serving.py"):
        assert word in str(errors[0])
    # The next one has the newest weights and version, is paused as the last one was, and takes requests.
    engine.continue_generation()
    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)
    assert essence([answer]) == essence([expected])
    assert answer.output_versions == [8] * 10
    assert engine._host.pid != first.pid
    assert not first.is_running()
    assert engine.export_stats()["restarts"] == 1


@pytest.mark.slow
def test_process_when_killed_after_a_refused_update_is_replaced_with_the_weights_it_had(start, generate):
    engine = start(process=True)
    (expected,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)
    with pytest.raises(BadInputError, match=r"no weight 'odd\.weight'"):
        engine.update_weights_from_memory([("odd.weight", torch.zeros(3))], 5)
    process = psutil.Process(engine._host.pid)

    process.kill()
    process.wait()
    engine.pause_generation()
    engine.continue_generation()
    (answer,) = generate(engine, [(PROMPT, {})], greedy=True, max_new_tokens=10)

    assert essence([answer]) == essence([expected])
    assert engine.export_stats()["restarts"] == 1


@pytest.mark.slow
def test_process_when_killed_before_any_answer_is_not_replaced(start):
    engine = start(process=True)
    pid = engine._host.pid

    async def kill():
        engine.pause_generation()
        task = asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=LONG)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(task, return_exceptions=True)

    (error,) = asyncio.run(kill())

    assert type(error) is GenerationProcessError
    assert "SIGKILL, perhaps for want of memory" in str(error)
    for use in (engine.pause_generation, engine.continue_generation, lambda: engine.update_weights_from_memory([], 1)):
        with pytest.raises(GenerationProcessError, match="SIGKILL"):
            use()
    engine.destroy()
    assert not psutil.pid_exists(pid)


_OWNER = """
import sys, time
from areal_core.api.configs import InferenceEngineConfig
from areal_local.config import LocalConfig
from areal_local.engine import LocalEngine
engine = LocalEngine(InferenceEngineConfig(plugin_options={"local": LocalConfig(process=True)}))
engine.initialize(sys.argv[1])
sys.stdout.write(f"{engine._host.pid}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_process_when_its_parent_ends_ends_too(signum, model_folder: Path):
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(model_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        child = psutil.Process(int(owner.stdout.readline()))
        assert child.ppid() == owner.pid
        # Ctrl-C on a terminal reaches the parent's group only.
        assert os.getpgid(child.pid) != os.getpgid(owner.pid)

        owner.send_signal(signum)
        owner.wait(30)

        _, alive = psutil.wait_procs([child], timeout=30)
        assert not alive


# ------------------------------------------------------------------------------------------------------- the parts


def test_frames_when_cut_anywhere_come_out_whole():
    sent = [
        frame({"op": "a", "x": [1.5, None]}, {"t": np.arange(5, dtype=np.int32), "f": np.zeros(0, np.float32)}),
        frame({"op": "b"}),
        frame({"op": "c", "text": "é"}, {"u": np.array([2**64 - 1], np.uint64)}),
    ]
    stream = b"".join(sent)

    for step in (1, 7, len(stream)):
        reader = FrameReader()
        frames = [f for i in range(0, len(stream), step) for f in reader.feed(stream[i : i + step])]
        assert [header for header, _ in frames] == [
            {"op": "a", "x": [1.5, None]},
            {"op": "b"},
            {"op": "c", "text": "é"},
        ]
        assert frames[0][1]["t"].tolist() == [0, 1, 2, 3, 4]
        assert frames[0][1]["f"].shape == (0,)
        assert frames[2][1]["u"].tolist() == [2**64 - 1]


def test_shared_weights_when_written_on_one_side_are_read_on_the_other_and_have_no_file():
    files = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    descriptor = create_segment()
    layout = ([[3, 5], [], [0, 4], [2]], ["bfloat16", "int64", "float32", "float64"])
    ours, theirs = SharedWeights(descriptor, *layout), SharedWeights(descriptor, *layout)

    ours.allocate()
    for tensor in ours.tensors:
        tensor.copy_(torch.randn(tensor.shape) * 10)

    torch.testing.assert_close(theirs.tensors, ours.tensors, rtol=0, atol=0)
    assert theirs.tensors[0].data_ptr() != ours.tensors[0].data_ptr()
    assert theirs.tensors[0].abs().sum() > 0
    assert files == (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set())
    os.close(descriptor)
