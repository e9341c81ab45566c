"""The language-model head of a model, run without the decoder before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class _HiddenOnly:
    """The output of a decoder of any kind, of which only the hidden states are known."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _GivenHidden(nn.Module):
    """Stands in for the decoder while the head runs: returns hidden states computed before."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly(self._hidden)


class _GivenLogits(nn.Module):
    """Stands in for the head: keeps what it is called with, and returns given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden.clone()
        return self._logits.clone()


class Head:
    """What a model makes of hidden states.

    Args:
        model: a transformers ``...ForCausalLM``.
        decoder: its part before the head.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self.model = model
        self.decoder_name = _name_of(model, decoder)
        self._adds_nothing: bool | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, V]`` of hidden states ``[S, H]``, by the model's own forward: soft-capping and scaling apply."""
        with _replaced(self.model, self.decoder_name, _GivenHidden(hidden[None])):
            return self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def plain_weight(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``W [V, H]`` if the logits are ``hidden @ W.T`` and nothing else, with tensor parallelism this rank's rows.

        None where a bias, scale, soft cap, adapter, hook or another kind of layer has a part in them.
        """
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None or head._forward_hooks or head._forward_pre_hooks:
            return None
        weight = head.weight
        split = isinstance(weight, DTensor)
        if "forward" in head.__dict__ and not split:
            return None
        if self._adds_nothing is None:
            self._adds_nothing = self._try_stub(head, hidden)
        if not self._adds_nothing:
            return None
        return weight.to_local() if split else weight

    @torch.no_grad()
    def _try_stub(self, head: nn.Module, hidden: torch.Tensor) -> bool:
        """Whether the model's forward gives its head the hidden states as they are, and returns its logits as such."""
        probe = torch.linspace(-3, 3, hidden.shape[-1], device=hidden.device).to(hidden.dtype)[None, None]
        stub = _GivenLogits(torch.linspace(-99, 99, 64, device=hidden.device).to(hidden.dtype)[None, None])
        with ExitStack() as stack:
            stack.enter_context(_replaced(self.model, self.decoder_name, _GivenHidden(probe)))
            stack.enter_context(_replaced(self.model, _name_of(self.model, head), stub))
            logits = self.model(inputs_embeds=probe, use_cache=False).logits
        unchanged = torch.equal(logits.float(), stub._logits.float())
        return unchanged and stub.seen is not None and torch.equal(stub.seen, probe)


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


@contextmanager
def _replaced(model: nn.Module, name: str, stub: nn.Module) -> Iterator[None]:
    parent, _, child = name.rpartition(".")
    siblings = model.get_submodule(parent)._modules
    original = siblings[child]
    siblings[child] = stub
    try:
        yield
    finally:
        siblings[child] = original
