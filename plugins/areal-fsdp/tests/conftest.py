from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# fsdp_cases.py is shared with the worker processes, which run it as a plain module.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that threads only get in each other's way."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _one_save_process() -> Iterator[None]:
    """Held, the process that writes checkpoints is started once for all tests."""
    from areal_fsdp.save_process import shared_save_process

    process = shared_save_process()
    yield
    process.close()
