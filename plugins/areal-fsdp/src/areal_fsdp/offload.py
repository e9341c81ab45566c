"""Moves a model and its optimizer's state between a device and host memory."""

from __future__ import annotations

import torch
from torch import nn


def move(module: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move parameters, buffers and optimizer state, sharded or not. Gradients must be gone.

    Counters of steps (single numbers) stay where the optimizer put them: fused updates want them on the device, others
    on the host.
    """
    module.to(device)
    if optimizer is None:
        return
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[key] = value.to(device)
