"""Muon: momentum whose matrix updates are orthogonalised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from areal_fsdp.low_precision import local
from areal_fsdp.shards import local_part

#: Jordan's quintic, steep at 0: singular values end between about 0.7 and 1.2, not exactly at 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
_EPS = 1e-7


def orthogonalise(matrix: torch.Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> torch.Tensor:
    """About ``U V^T`` of ``matrix = U S V^T``, by Newton-Schulz iterations ``X <- a X + (b A + c A^2) X, A = X X^T``.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); its coefficients.

    Args:
        matrix: ``[m, n]``; the iterations run in its type.
    """
    if matrix.ndim != 2:
        raise ValueError(f"a matrix has two dimensions, got {tuple(matrix.shape)}")
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, AdamW for everything else (groups with ``muon: False``).

    ``B <- mu B + (1 - mu) g``, update ``O = NS((1 - mu) g + mu B)`` (Nesterov), ``W <- W (1 - lr wd) - lr s O`` with
    ``s = 0.2 sqrt(max(m, n))``, which gives updates the size of AdamW's, so that one learning rate and one weight decay
    serve both (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, eq. 4). In one process and bf16 this
    is ``torch.optim.Muon(nesterov=True, adjust_lr_fn="match_rms_adamw")``. That one is not used because it rounds to
    bf16 whatever the type of the parameters, and multiplies sharded matrices piecewise in every iteration: here each
    rank gathers the update of one matrix at a time, orthogonalises it whole, and keeps its own part, so that no number
    depends on how many ranks there are.

    Args:
        groups: parameter groups, each with ``muon`` true or false.
        momentum: ``mu``.
        precision: type of the Newton-Schulz iterations; None for bf16 on an accelerator (as in the paper), and fp32 on
            a CPU, which has no faster one.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.precision = precision
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"] and parameter.ndim != 2:
                    raise ValueError(f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}")

    def init_state(self, parameter: torch.Tensor) -> None:
        """The state before the first step, so that there is something to load a checkpoint into."""
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        self._init_state(parameter, group)

    def _init_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if group["muon"]:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for parameter in used:
                if not self.state[parameter]:
                    self._init_state(parameter, group)
            if group["muon"]:
                for parameter in used:
                    self._update(parameter, group)
            elif used:
                self._adamw(used, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        buffer, mu = self.state[parameter]["momentum_buffer"], group["momentum"]
        gradient: Any = parameter.grad
        buffer.lerp_(gradient, 1 - mu)
        update = gradient.lerp(buffer, mu)
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        precision = self.precision or (torch.bfloat16 if whole.device.type != "cpu" else torch.float32)
        orthogonal = orthogonalise(whole.to(precision))
        rows, columns = whole.shape
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * math.sqrt(max(rows, columns))
        weight.add_(local_part(orthogonal, parameter).to(weight.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
