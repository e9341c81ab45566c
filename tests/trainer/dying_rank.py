"""`areal`, but rank 1 ends in its second step: by an error, or killed. Started by torchrun."""

from __future__ import annotations

import os
import signal
from typing import Any

from areal_core.cli.main import main
from areal_fsdp.engine import FSDPEngine

plain_train_batch = FSDPEngine.train_batch


def train_batch(self: FSDPEngine, *arguments: Any, **keywords: Any) -> dict[str, float]:
    if os.environ["RANK"] == "1" and self.steps == 1:
        if os.environ["TEST_DEATH"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("this rank breaks")
    return plain_train_batch(self, *arguments, **keywords)


if __name__ == "__main__":
    FSDPEngine.train_batch = train_batch  # type: ignore[method-assign]
    main()
