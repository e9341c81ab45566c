"""From a model without memory, split over ranks, to one that holds each rank's part of the weights.

The model is built on the meta device and split there. Then rank 0 reads one tensor after the other and broadcasts it,
and every rank keeps its part: no rank ever holds more than its parts and one whole tensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from areal_fsdp import comm
from areal_fsdp.low_precision import local
from areal_fsdp.shards import local_part
from areal_fsdp.weight_source import WeightSource, named_weights

_META = torch.device("meta")


def make_buffers(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device its buffers, while its parameters are still there.

    Those that no file holds (frequencies of rotary embeddings, scales) are computed as transformers computes them when
    it loads a model, which it does on the meta device too.
    """
    from transformers import PreTrainedModel

    persistent = model.state_dict(keep_vars=True)
    owner: dict[int, PreTrainedModel] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Inner models come later, and overwrite what outer ones claimed.
            owner.update({id(child): module for child in module.modules()})
    for prefix, module in model.named_modules():
        computed = False
        for name, buffer in list(module._buffers.items()):
            if buffer is None or buffer.device != _META:
                continue
            module._buffers[name] = torch.empty_like(buffer, device=device)
            computed |= (f"{prefix}.{name}" if prefix else name) not in persistent
        if computed:
            with torch.no_grad(), torch.device(device):
                owner[id(module)]._init_weights(module)


def fill(
    model: nn.Module,
    source: WeightSource | None,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    storage: torch.device,
) -> None:
    """Give every parameter of ``model`` memory, and its part of the weights that rank 0 has. Collective.

    Args:
        source: on the group's first rank; None elsewhere.
        device: where whole tensors are broadcast.
        storage: where the parts stay: ``device``, or the CPU when they are offloaded.

    Raises:
        BadInputError: on rank 0, if a file breaks on the way; the others raise an error that quotes it.
    """
    _allocate(model, storage)
    first = dist.get_global_rank(group, 0)
    error: Exception | None = None
    with torch.no_grad():
        for name, target in named_weights(model):
            whole = torch.empty(target.shape, dtype=target.dtype, device=device if source is None else None)
            if source is not None and error is None:
                try:
                    whole = source.take(name).to(device, target.dtype).contiguous()
                except Exception as caught:  # the others wait for the rest: go on, and tell them afterwards
                    error = caught
            whole = whole.to(device)
            dist.broadcast(whole, src=first, group=group)
            local(target).copy_(local_part(whole, target))
    comm.raise_together(error, group, device)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device; one that is tied to another stays tied."""
    placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or local(parameter).device != _META:
                continue
            if id(parameter) not in placed:
                empty = torch.empty_like(parameter, device=device)
                # With the old one, so that no other object gets its id.
                placed[id(parameter)] = (nn.Parameter(empty, requires_grad=parameter.requires_grad), parameter)
            module._parameters[name] = placed[id(parameter)][0]
