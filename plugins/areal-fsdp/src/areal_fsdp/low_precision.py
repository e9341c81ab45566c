"""AdamW whose states, parameters, or both are bfloat16, with the rounding errors taken care of."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

Rounding = Literal["none", "kahan", "stochastic"]

#: Generators are seeded by step, parameter and tensor; these keep the three apart.
_STEP_STRIDE, _PARAMETER_STRIDE = 1_000_003, 31


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor: what is done to every element alone needs no communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def round_stochastically(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, up or down with a probability that makes the mean exact.

    bf16 is the upper half of fp32: adding 16 random bits to the lower half carries into the upper one with the
    probability of its share of a unit in the last place (Gupta et al., arXiv:1502.02551, section 3).

    Args:
        value: fp32, any shape; infinities and NaNs stay what they are.

    Returns:
        bf16 of the same shape.
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), computed in fp32 and stored in fewer bits.

    A bf16 parameter has 8 bits of precision: an update below 2^-9 of it is lost when rounded to nearest. ``kahan``
    keeps what was lost in a bf16 compensation per parameter (Zamirai et al., arXiv:2010.06192, algorithm 3) and adds it
    in the next step; ``stochastic`` rounds parameters and bf16 states by chance, so that small updates arrive in the
    mean, and needs no memory. The chance depends on the step and the place of the parameter alone: replicas stay equal,
    and a resumed run repeats.

    Args:
        groups: parameter groups as torch's AdamW takes them.
        state_dtype: of the two moments; None for each parameter's own type.
        rounding: applies to bf16 tensors; others are stored as computed.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype | None,
        rounding: Rounding,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype, self.rounding = state_dtype, rounding
        self._generators: dict[torch.device, torch.Generator] = {}

    def init_state(self, parameter: torch.Tensor) -> None:
        """The state before the first step, so that there is something to load a checkpoint into."""
        dtype = self.state_dtype or parameter.dtype
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        if self.rounding == "kahan" and parameter.dtype == torch.bfloat16:
            state["compensation"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place += 1
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(parameter)
                self._update(parameter, group, place)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], place: int) -> None:
        state = self.state[parameter]
        state["step"] += 1
        # On the host: no transfer from the device.
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        weight, gradient = local(parameter), local(parameter.grad).float()  # type: ignore[arg-type]
        generator = self._generator(weight.device, step * _STEP_STRIDE + place * _PARAMETER_STRIDE)
        first = local(state["exp_avg"]).float().lerp(gradient, 1 - beta1)
        second = local(state["exp_avg_sq"]).float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        self._store(local(state["exp_avg"]), first, generator)
        self._store(local(state["exp_avg_sq"]), second, generator)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = first.div_(denominator).mul_(-group["lr"] / (1 - beta1**step))
        update.add_(weight.float(), alpha=-group["lr"] * group["weight_decay"])
        compensation = state.get("compensation")
        if compensation is None:
            self._store(weight, weight.float() + update, generator)
            return
        wanted = weight.float() + (update + local(compensation).float())
        weight.copy_(wanted)
        local(compensation).copy_(wanted - weight.float())

    def _store(self, target: torch.Tensor, value: torch.Tensor, generator: torch.Generator) -> None:
        if self.rounding == "stochastic" and target.dtype == torch.bfloat16:
            value = round_stochastically(value, generator)
        target.copy_(value)

    def _generator(self, device: torch.device, seed: int) -> torch.Generator:
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(seed)
