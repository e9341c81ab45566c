"""Native models: what a package registers to add an architecture that engines run without transformers' model code."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from areal_core.errors import PluginError
from areal_core.plugins import PluginManager, get_plugin_manager

if TYPE_CHECKING:
    import torch
    from torch import nn


@attrs.define(kw_only=True)
class BaseModelArgs(abc.ABC):
    """Hyper-parameters of a native model, read from a Hugging Face configuration."""

    @classmethod
    @abc.abstractmethod
    def from_hf_config(cls, hf_config: Any, is_critic: bool = False, **kwargs: Any) -> BaseModelArgs:
        """Map a ``PretrainedConfig``. Raise ``BadInputError`` for a feature that the model does not implement."""


class BaseArchonModel(Protocol):
    """The interface of a native model; an ``nn.Module`` that has these methods, made by ``model_class(model_args)``.

    Its layers attend through a :class:`areal_core.api.packed_attention.PackedAttention` each, which engines then
    compute in their own ways; an engine that generates cannot keep the keys and values of any other attention, and
    reads every sequence anew for each token.
    """

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        tree_attn_meta: Any = None,
    ) -> torch.Tensor:
        """Packed forward.

        Args:
            tokens: int64 ``[T]``.
            positions: int64 ``[T]``, of each token in its sequence. Where an engine decodes, it sends new tokens only,
                and they start above 0.
            cu_seqlens: int32 ``[sequences + 1]``, where the tokens of each sequence begin; see ``PackedAttention``.
            max_seqlen: above every position, and no sequence has more tokens.
            tree_attn_meta: handed on to ``PackedAttention``.

        Returns:
            Logits ``[T, V]``.
        """
        ...

    def init_weights(self) -> None:
        """Initialise every parameter in place; tie again what building on the meta device has untied."""
        ...

    def init_buffers(self, buffer_device: torch.device | str) -> None:
        """Compute the buffers (RoPE tables and the like) on ``buffer_device``."""
        ...


class BaseStateDictAdapter(abc.ABC):
    """Maps parameter names and layouts between a native model and Hugging Face."""

    def __init__(self, model_args: BaseModelArgs, hf_config: Any = None) -> None:
        self.model_args, self.hf_config = model_args, hf_config

    @abc.abstractmethod
    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Native parameters of Hugging Face ones; without those that the model has no use for."""

    @abc.abstractmethod
    def to_hf(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse of ``from_hf``; a tied tensor may come under one of its names."""

    @abc.abstractmethod
    def convert_single_to_hf(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """One native parameter as Hugging Face ones, for streamed weight updates.

        Args:
            tensor: perhaps on the meta device, where only names and shapes are asked for.

        Returns:
            (name, tensor) of each; several for a stack of experts, none for the second end of a tie.
        """


class ParallelizeFn(Protocol):
    """Applies, in this order, TP, EP, CP, activation checkpointing, compile and FSDP to a model on the meta device."""

    def __call__(self, model: nn.Module, parallel_dims: Any, **kwargs: Any) -> nn.Module: ...


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Everything an engine needs to know of one architecture."""

    name: str
    model_class: type
    model_args_class: type[BaseModelArgs]
    state_dict_adapter_class: type[BaseStateDictAdapter]
    parallelize_fn: ParallelizeFn
    supported_model_types: frozenset[str] = attrs.field(converter=frozenset)
    pipelining_fn: Callable[..., Any] | None = None


def load_model_spec(name: str, key: str | None = None, manager: PluginManager | None = None) -> ModelSpec:
    """The model spec registered under a name, or at an import path ``package.module:attribute``.

    Args:
        key: the configuration key that holds the name; begins the error message.

    Raises:
        PluginError: if the name is unknown, ambiguous or broken, or stands for something else.
    """
    spec = (manager or get_plugin_manager()).load("areal_model_specs", name, key)
    if not isinstance(spec, ModelSpec):
        prefix = f"{key}: " if key else ""
        raise PluginError(f"{prefix}the model spec {name!r} is {spec!r:.80}. It must be a ModelSpec.")
    return spec


def find_model_spec(model_type: str, manager: PluginManager | None = None) -> ModelSpec | None:
    """The model spec for the ``model_type`` of a checkpoint's ``config.json``; None if no plugin registers one.

    Raises:
        PluginError: if it is ambiguous or broken, or does not read the type that it is registered for.
    """
    manager = manager or get_plugin_manager()
    if not any(entry.name == model_type for entry in manager.registrations("areal_model_specs")):
        return None
    spec = load_model_spec(model_type, manager=manager)
    if model_type not in spec.supported_model_types:
        raise PluginError(
            f"the model spec {spec.name!r} is registered as {model_type!r}, but reads only "
            f"{', '.join(map(repr, sorted(spec.supported_model_types))) or 'no type'}. Register it under those names."
        )
    return spec
