import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import reward_functions as rewards

from areal_core.api.reward_api import KINDS, AsyncRewardWrapper, RewardError
from areal_core.errors import BadInputError

BAD = {
    "raise": ("raised", "raised ValueError: no such answer"),
    "hang": ("timeout", r"took more than 0\.5 s"),
    "sys.exit": ("exited", r"called sys\.exit\(3\)"),
    "none": ("none", "returned None"),
    "nan": ("nan", "returned NaN"),
    "inf": ("inf", "returned -inf"),
    "huge int": ("inf", "returned an integer too large"),
    "huge float": ("inf", r"returned 1e\+300, too large for a 32-bit float"),
    "bool": ("type", "returned a bool: True"),
    "str": ("type", r"returned a str: '1\.0'"),
    "list": ("type", r"returned a list: \[1\.0\]"),
    "wrong length": ("type", r"returned a list: \[1\.0, 0\.0\]"),
    "empty": ("type", r"returned a list: \[\]"),
    "tensor": ("type", "returned a TensorLike"),
    "array": ("type", "returned a ndarray"),
}
GOOD = {"fine": 1.0, "numpy float": 0.5, "numpy int": 2.0}


@pytest.fixture
def wrap():
    made = []

    def make(fn, **options):
        made.append(AsyncRewardWrapper(fn, **{"timeout": 0.5, "name": "mine", **options}))
        return made[-1]

    yield make
    for wrapper in made:
        wrapper.destroy()


def in_thread():
    return lambda *args, **data: rewards.misbehave_reward_fn(*args, **data)


WAYS = {"process": rewards.misbehave_reward_fn, "thread": in_thread(), "event loop": rewards.async_reward_fn}


@pytest.mark.parametrize("way", WAYS)
async def test_reward_when_it_misbehaves_raises_its_kind_and_counts_it(wrap, way):
    reward = wrap(WAYS[way], max_workers=2)
    assert reward.runs_in == way

    results = await asyncio.gather(*(reward("p", case) for case in BAD), return_exceptions=True)

    for (kind, message), error in zip(BAD.values(), results, strict=True):
        assert isinstance(error, RewardError)
        assert error.kind == kind
        with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
            raise error
    kinds = [kind for kind, _ in BAD.values()]
    assert reward.stats == {kind: kinds.count(kind) for kind in KINDS}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", GOOD)
async def test_reward_when_a_real_number_returns_a_float(wrap, way, case):
    value = await wrap(WAYS[way], timeout=30.0)("p", case)

    assert type(value) is float
    assert value == GOOD[case]


@pytest.mark.parametrize(("case", "how"), [("os._exit", "exit code 5"), ("segfault", "SIGSEGV")])
async def test_process_when_it_ends_fails_one_call_and_is_replaced(wrap, case, how):
    reward = wrap(rewards.misbehave_reward_fn, timeout=30.0)
    cases = ["fine", case, "numpy float", case, "fine"]

    results = await asyncio.gather(*(reward("p", case) for case in cases), return_exceptions=True)

    assert [result for result in results if not isinstance(result, Exception)] == [1.0, 0.5, 1.0]
    for error in (results[1], results[3]):
        assert isinstance(error, RewardError) and error.kind == "exited"
        assert how in str(error)
    assert await reward("p", "fine") == 1.0


async def test_process_when_killed_in_a_call_fails_that_call_and_is_replaced(wrap):
    reward = wrap(rewards.misbehave_reward_fn, timeout=30.0)
    pid = int(await reward("p", "pid"))
    hung = asyncio.ensure_future(reward("p", "hang"))
    after = asyncio.ensure_future(reward("p", "fine"))
    await asyncio.sleep(0)

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RewardError, match="SIGKILL") as info:
        await hung
    assert info.value.kind == "exited"
    assert await after == 1.0
    assert int(await reward("p", "pid")) != pid
    assert reward.stats["exited"] == 1


async def test_process_when_killed_between_calls_is_replaced(wrap):
    reward = wrap(rewards.misbehave_reward_fn, timeout=30.0)
    pid = int(await reward("p", "pid"))

    os.kill(pid, signal.SIGKILL)

    # The call that meets the death may be lost to it, and no other.
    results = await asyncio.gather(*(reward("p", "fine") for _ in range(3)), return_exceptions=True)
    assert results.count(1.0) >= 2
    assert all(result == 1.0 or result.kind == "exited" for result in results)
    assert await reward("p", "fine") == 1.0


async def test_process_when_one_call_hangs_others_are_unaffected(wrap):
    reward = wrap(rewards.misbehave_reward_fn, max_workers=2)
    cases = ["fine" if index % 40 else "hang" for index in range(120)]

    results = await asyncio.gather(*(reward("p", case) for case in cases), return_exceptions=True)

    for case, result in zip(cases, results, strict=True):
        assert (result == 1.0) if case == "fine" else (isinstance(result, RewardError) and result.kind == "timeout")


async def test_process_when_calls_wait_for_it_times_each_from_its_own_start(wrap):
    # Two seconds together, of which no call takes one.
    reward = wrap(rewards.misbehave_reward_fn, timeout=1.0)

    results = await asyncio.gather(*(reward("p", "slow") for _ in range(8)))

    assert results == [1.0] * 8


async def test_process_when_many_calls_answers_each_its_own(wrap):
    reward = wrap(rewards.length_reward_fn, timeout=30.0, max_workers=2)

    results = await asyncio.gather(*(reward("p", "x" * n, [1] * n, [2] * n, answer=str(n)) for n in range(1000)))

    assert results == [float(n) for n in range(1000)]


async def test_process_when_arguments_are_larger_than_a_socket_buffer_gets_them(wrap):
    reward = wrap(rewards.length_reward_fn, timeout=60.0)

    results = await asyncio.gather(*(reward("p", "x" * 3_000_000) for _ in range(4)))

    assert results == [3_000_000.0] * 4


async def test_process_when_started_has_not_loaded_torch(wrap):
    assert await wrap(rewards.misbehave_reward_fn, timeout=30.0)("p", "torch loaded") == 0.0


async def test_process_when_it_gives_a_tensor_of_torch_says_so(wrap):
    # Importing torch takes seconds there.
    with pytest.raises(RewardError, match=r"returned a Tensor: tensor\(1\.\)") as info:
        await wrap(rewards.misbehave_reward_fn, timeout=120.0)("p", "torch tensor")

    assert info.value.kind == "type"


async def test_process_when_calls_are_cancelled_goes_on(wrap):
    reward = wrap(rewards.misbehave_reward_fn)
    tasks = [asyncio.ensure_future(reward("p", "hang")) for _ in range(3)]
    await asyncio.sleep(0)

    for task in tasks:
        task.cancel()

    assert await reward("p", "fine") == 1.0


async def test_process_when_arguments_cannot_be_sent_counts_as_raised(wrap):
    reward = wrap(rewards.length_reward_fn, timeout=30.0)

    with pytest.raises(RewardError, match="cannot be sent its arguments") as info:
        await reward("p", "x", column=lambda: None)

    assert info.value.kind == "raised"
    assert await reward("p", "x") == 1.0


async def test_wrapper_when_destroyed_leaves_no_process_and_can_start_again(wrap):
    reward = wrap(rewards.misbehave_reward_fn, timeout=30.0)
    first = int(await reward("p", "pid"))
    waiting = asyncio.ensure_future(reward("p", "hang"))
    await asyncio.sleep(0)

    reward.destroy()
    reward.destroy()

    assert not psutil.pid_exists(first)
    with pytest.raises(Exception, match="shut down"):
        await waiting
    assert int(await reward("p", "pid")) != first


def test_wrapper_when_event_loop_changes_starts_anew(wrap):
    reward = wrap(rewards.misbehave_reward_fn, timeout=30.0)

    first = asyncio.run(reward("p", "pid"))
    second = asyncio.run(reward("p", "pid"))

    assert first != second
    assert not psutil.pid_exists(int(first))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_process_when_parent_ends_ends_too(tmp_path, end):
    program = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        sys.path.insert(0, {str(Path(rewards.__file__).parent)!r})
        import reward_functions as rewards
        from areal_core.api.reward_api import AsyncRewardWrapper

        async def main():
            reward = AsyncRewardWrapper(rewards.misbehave_reward_fn, timeout=60.0)
            sys.stdout.write(str(int(await reward("p", "pid"))) + "\\n")
            sys.stdout.flush()
            hung = asyncio.ensure_future(reward("p", "hang"))
            await asyncio.sleep(0.1)
            if {end!r} == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    pid = int(result.stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the reward process outlived its parent"
        time.sleep(0.05)
    if end == "exit":
        assert result.returncode == 0, result.stderr


async def test_process_when_reward_prints_keeps_stdout_clean(wrap, capfd):
    assert await wrap(rewards.misbehave_reward_fn, timeout=30.0)("p", "stdout") == 1.0

    captured = capfd.readouterr()
    assert "noise" not in captured.out
    assert "noise" in captured.err


async def test_wrapper_when_function_has_no_kwargs_gets_the_columns_it_names(wrap):
    assert await wrap(rewards.strict_reward_fn, timeout=30.0)("p", "4", answer="4", messages=[], other=1) == 1.0


async def test_wrapper_when_options_are_bound_a_column_does_not_replace_them(wrap):
    reward = wrap(functools.partial(rewards.scaled_reward_fn, scale=3.0), timeout=30.0)

    assert reward.runs_in == "process"
    assert await reward("p", "xx", scale=100.0) == 6.0


async def test_wrapper_when_given_a_wrapper_is_transparent(wrap):
    inner = wrap(rewards.misbehave_reward_fn, timeout=30.0)
    outer = AsyncRewardWrapper(inner)

    assert await outer("p", "numpy float") == 0.5
    with pytest.raises(RewardError):
        await outer("p", "nan")
    assert outer.stats["nan"] == inner.stats["nan"] == 1


async def test_wrapper_when_module_cannot_be_imported_by_name_loads_its_file(wrap, tmp_path):
    import importlib.util

    file = tmp_path / "elsewhere_rewards.py"
    file.write_text("def two_reward_fn(*args, **data):\n    return 2\n")
    spec = importlib.util.spec_from_file_location("elsewhere_rewards", file)
    module = sys.modules["elsewhere_rewards"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    reward = wrap(module.two_reward_fn, timeout=30.0)

    assert reward.runs_in == "process"
    assert await reward("p", "c") == 2.0


async def test_wrapper_when_process_cannot_import_it_is_bad_input(wrap, tmp_path, monkeypatch):
    file = tmp_path / "only_here_rewards.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('not here')\ndef f(*a, **k): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here_rewards

    reward = wrap(only_here_rewards.f)

    for _ in range(2):
        with pytest.raises(BadInputError, match=r"cannot be imported in a process of its own.*not here"):
            await reward("p", "c")


async def test_thread_when_a_call_hangs_others_get_another_thread(wrap):
    reward = wrap(in_thread())

    results = await asyncio.gather(*(reward("p", case) for case in ("hang", "fine", "fine")), return_exceptions=True)

    assert isinstance(results[0], RewardError)
    assert results[1:] == [1.0, 1.0]


def test_export_stats_when_called_reports_calls_and_errors(wrap):
    reward = wrap(rewards.async_reward_fn)

    async def play():
        await reward("p", "fine")
        with pytest.raises(RewardError):
            await reward("p", "nan")

    asyncio.run(play())

    stats, later = reward.export_stats(), reward.export_stats()
    assert stats["reward/calls"] == 2.0
    assert stats["reward/errors/nan"] == 1.0
    assert later["reward/calls"] == 0.0 and "reward/errors/nan" not in later
    assert reward.stats["nan"] == 1


@pytest.mark.parametrize("way", WAYS)
async def test_reward_when_it_raises_names_the_line_of_its_own_file(wrap, way):
    lines = Path(rewards.__file__).read_text().splitlines()
    line = 1 + next(index for index, text in enumerate(lines) if "no such answer" in text)

    with pytest.raises(RewardError) as info:
        await wrap(WAYS[way], timeout=30.0)("p", "raise")

    # The thread's function is a lambda of this file, which calls the other one.
    file = r"test_reward_api\.py, line \d+" if way == "thread" else rf"reward_functions\.py, line {line}"
    assert re.search(rf"raised ValueError: no such answer \({file}\)$", str(info.value))


async def test_reward_when_it_raises_in_a_library_names_the_line_that_called_it(wrap, tmp_path, monkeypatch):
    (tmp_path / "calling_rewards.py").write_text(
        "import json\n\n\ndef parse(text):\n    return json.loads(text)\n\n\n"
        "def calling_reward_fn(prompt, completions, *ids, **data):\n    return parse(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import calling_rewards

    with pytest.raises(RewardError, match=r"raised JSONDecodeError: .* \(calling_rewards\.py, line 5\)$"):
        await wrap(calling_rewards.calling_reward_fn, timeout=30.0)("p", "{")


async def test_reward_when_it_cannot_be_called_so_names_no_line(wrap):
    with pytest.raises(RewardError, match=r"missing 1 required positional argument: 'answer'$"):
        await wrap(rewards.strict_reward_fn, timeout=30.0)("p", "c")
