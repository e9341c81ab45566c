"""Moves a model and its optimizer's state between a device and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from areal_fsdp.optim import ensure_state

HOST = torch.device("cpu")


class Placement:
    """Where a model is.

    Args:
        device: where it computes.
        is_fixed: it never moves, as shards that live in host memory anyway. Nor does a model on a CPU, which has
            nowhere to go. Still, a call in the wrong order is a mistake there too.

    Attributes:
        place: ``device``, ``host``, or ``logits``: the decoder layers are in host memory; the rest of the model
            (embeddings, the last norm, the head), which is little beside them, is on the device.
    """

    def __init__(self, device: torch.device, *, is_fixed: bool) -> None:
        self.device = device
        self.is_fixed = is_fixed or device.type == "cpu"
        self.place: Literal["device", "logits", "host"] = "device"

    def offload(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        *,
        keep_logits: bool,
    ) -> None:
        """Move to host memory what is not there: all of ``module``, or only its ``layers``."""
        if self.place == "host" and keep_logits:
            self.onload(module, optimizer)
        wanted: Literal["logits", "host"] = "logits" if keep_logits else "host"
        if self.place != wanted and not self.is_fixed:
            if optimizer is not None:
                # Before a first step: its counters, too, must be made where updates want them.
                ensure_state(optimizer)
            move(layers if keep_logits else [module], optimizer, HOST)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self.place = wanted

    def onload(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if self.place != "device" and not self.is_fixed:
            move([module], optimizer, self.device)
        self.place = "device"


def move(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move parameters, buffers and optimizer state, sharded or not. Gradients must be gone.

    Counters of steps (single numbers) stay where the optimizer put them: fused updates want them on the device, others
    on the host.
    """
    for module in modules:
        module.to(device)
    if optimizer is None:
        return
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[key] = value.to(device)
