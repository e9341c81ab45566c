"""The language-model head of a model, run without the decoder before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import attrs
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
    """Stands in for the head: keeps what it is called with, and returns given logits (of any number of tokens)."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.seen: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen = hidden
        return self._logits


@attrs.frozen(eq=False)
class LinearHead:
    """A head whose logits are ``after(hidden @ weight.T)``.

    Attributes:
        weight: ``[V, H]``; with tensor parallelism this rank's rows.
        after: of each logit for itself, ``[S, B]`` to ``[S, B]``; None: nothing.
    """

    weight: torch.Tensor
    after: Callable[[torch.Tensor], torch.Tensor] | None


class Head:
    """What a model makes of hidden states.

    Args:
        model: a transformers ``...ForCausalLM``.
        decoder: its part before the head.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self.model = model
        self.decoder_name = _name_of(model, decoder)
        self._kind: Literal["plain", "elementwise", "other"] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, V]`` of hidden states ``[S, H]``, by the model's own forward: soft-capping and scaling apply."""
        with _replaced(self.model, self.decoder_name, _GivenHidden(hidden[None])):
            return self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def linear(self, hidden: torch.Tensor) -> LinearHead | None:
        """The head as a product of matrices and a function of single logits, such as a soft cap or a scale.

        None where it is something else: where a bias, an adapter, a hook or another kind of layer has a part in it, or
        where the hidden states are changed before it.
        """
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None or head._forward_hooks or head._forward_pre_hooks:
            return None
        weight = head.weight
        split = isinstance(weight, DTensor)
        if "forward" in head.__dict__ and not split:
            return None
        name = _name_of(self.model, head)
        if self._kind is None:
            self._kind = self._try(name, hidden)
        if self._kind == "other":
            return None
        after = None if self._kind == "plain" else functools.partial(self._after, name, hidden[:1].detach())
        return LinearHead(weight.to_local() if split else weight, after)

    def _after(self, name: str, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What the model's forward makes of the product ``[S, B]`` of its head, called ``name``."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(self.model, self.decoder_name, _GivenHidden(hidden[None])))
            stack.enter_context(_replaced(self.model, name, _GivenLogits(logits[None])))
            return self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]

    @torch.no_grad()
    def _try(self, name: str, hidden: torch.Tensor) -> Literal["plain", "elementwise", "other"]:
        """Whether the head gets the hidden states as they are, and what becomes of its product."""
        probe = torch.linspace(-3, 3, hidden.shape[-1], device=hidden.device).to(hidden.dtype)[None]
        given = torch.linspace(-99, 99, 64, device=hidden.device).to(hidden.dtype)[None]
        stub = _GivenLogits(given[None])
        with ExitStack() as stack:
            stack.enter_context(_replaced(self.model, self.decoder_name, _GivenHidden(probe[None])))
            stack.enter_context(_replaced(self.model, name, stub))
            logits = self.model(inputs_embeds=probe[None], use_cache=False).logits[0]
        if stub.seen is None or not torch.equal(stub.seen[0], probe) or logits.shape != given.shape:
            return "other"
        if torch.equal(logits.float(), given.float()):
            return "plain"
        # In another place and in other company a logit must become the same.
        turned, half = self._after(name, probe, given.flip(-1)), self._after(name, probe, given[:, :32])
        alone = torch.allclose(turned.flip(-1), logits) and torch.allclose(half, logits[:, :32])
        return "elementwise" if alone else "other"


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
