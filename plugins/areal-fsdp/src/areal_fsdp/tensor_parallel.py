"""Tensor and sequence parallelism: parameters are DTensors placed by the model's own plan, the forward runs on shards.

The plan is transformers' ``base_model_tp_plan``; the embedding and the head, sharded over the vocabulary, are added. A
*block* is a module with planned layers in it (attention, MLP): its column-parallel layers read the whole input, its
row-parallel layers add up to the whole output (Shoeybi et al. 2019, arXiv:1909.08053). With sequence parallelism what
lies between the blocks (norms, residual stream) holds a part of the tokens on each rank (Korthikanti et al. 2022,
arXiv:2205.05198).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from areal_core.errors import BadInputError, ConfigError
from areal_fsdp.exchange import copy_to_group, gather_rows, reduce_from_group, scatter_rows
from areal_fsdp.vocab_parallel import vocab_range

#: Styles of ``base_model_tp_plan`` that are implemented.
_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_FUSED = ("qkv_proj", "gate_up_proj")
_ADVICE = "Use data and context parallelism (fsdp:dXcZ) for this model"


def check_heads(hf_config: Any, *, tensor: int, context: int, key: str = "backend") -> None:
    """Raise unless the attention heads (and the MLP) of a model can be split; reads nothing but its configuration.

    Raises:
        BadInputError: naming the model type, the sizes, and sizes that would do.
    """
    config = hf_config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kind = config.model_type
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        if tensor * context > 1:
            raise BadInputError(f"{key}: model type {kind!r} has no attention heads to split. Use fsdp:dN.")
        return
    if tensor > 1 and not getattr(config, "base_model_tp_plan", None):
        raise BadInputError(
            f"{key}: t{tensor} needs a tensor-parallel plan, but transformers has none (base_model_tp_plan) for model "
            f"type {kind!r}. {_ADVICE}."
        )
    width = getattr(config, "intermediate_size", None)
    split = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if isinstance(width, int):
        split["intermediate_size"] = width
    for name, size in split.items():
        if size % tensor:
            fits = [n for n in range(1, tensor) if all(s % n == 0 for s in split.values())]
            raise BadInputError(
                f"{key}: t{tensor} cannot split {name} = {size} of model type {kind!r} evenly. "
                f"Use t = {_either(fits)}, or more data and context parallelism."
            )
    local = heads // tensor
    if local % context:
        fits = [n for n in range(1, context) if local % n == 0]
        raise BadInputError(
            f"{key}: c{context} cannot split the {local} attention heads that each tensor-parallel rank of model type "
            f"{kind!r} has (num_attention_heads = {heads}, t = {tensor}). Use c = {_either(fits)}."
        )


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))


@attrs.frozen(eq=False)
class TensorParallel:
    """How one model is split over the ranks of ``tp``.

    Attributes:
        sequence_parallel: the hidden states between blocks, and those that the decoder returns, are this rank's rows.
        vocab_start: first token id of the logits that this rank's head computes.
        vocab_size: entries of all ranks together; 0 without such a head.
    """

    group: dist.ProcessGroup
    ranks: int
    sequence_parallel: bool
    vocab_start: int
    vocab_size: int

    def whole_hidden(self, hidden: torch.Tensor, *, split_head: bool) -> torch.Tensor:
        """All rows ``[N, W]`` of the decoder's hidden states, for a head that is split over the vocabulary or not."""
        if self.sequence_parallel:
            return gather_rows(hidden, self.group, partial=split_head)
        return copy_to_group(hidden, self.group) if split_head else hidden


def parallelize(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> TensorParallel:
    """Shard a transformers model in place: every parameter becomes a DTensor on ``mesh``. No communication.

    Works on the meta device, and on models with LoRA adapters. Every rank must hold the same weights.

    Raises:
        BadInputError: naming the layer or parameter that cannot be split.
    """
    return _Parallelizer(model, mesh, sequence_parallel).run()


class _Parallelizer:
    def __init__(self, model: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.model, self.mesh, self.sequence_parallel = model, mesh, sequence_parallel
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.kind = model.config.get_text_config().model_type
        # By the id of the parameter it replaces, which is kept, so that no other object gets that id.
        self.placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.names = {id(module): name for name, module in model.named_modules()}

    def run(self) -> TensorParallel:
        decoder = self.model.get_decoder()
        styles = self._styles(decoder)
        blocks = self._blocks(decoder, styles)
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        vocab_start = vocab_size = 0
        for module in _leaves(embedding):
            self._vocab_embedding(module)
        for module, style in styles:
            {"colwise": self._colwise, "rowwise": self._rowwise}.get(style, self._per_head)(module)
        if head is not None:
            self._colwise(head, even=False)
            vocab_size = _rows_of(head)
            vocab_start = vocab_range(vocab_size, self.rank, self.ranks)[0]
        for block in blocks:
            block.register_forward_pre_hook(self._whole_input, with_kwargs=True)
        self._rest(blocks, after_gather=getattr(self.model, "score", None))
        return TensorParallel(self.group, self.ranks, self.sequence_parallel, vocab_start, vocab_size)

    # ------------------------------------------------------------------------------------- what the plan covers

    def _styles(self, decoder: nn.Module) -> list[tuple[nn.Module, str]]:
        plan: dict[str, str] = dict(getattr(decoder.config, "base_model_tp_plan", None) or {})
        patterns = {entry: re.compile(re.escape(entry).replace(r"\*", r"\d+")) for entry in plan}
        modules = dict(decoder.named_modules())
        embedding = self.model.get_input_embeddings()
        names = [*modules, *(name for name, _ in decoder.named_parameters())]
        matches = {
            entry: [n for n in names if pattern.fullmatch(n) is not None and modules.get(n) is not embedding]
            for entry, pattern in patterns.items()
        }
        for entry, matched in matches.items():
            if matched and plan[entry] in _STYLES and any(name not in modules for name in matched):
                raise ConfigError(
                    f"tensor parallelism of model type {self.kind!r} splits {entry}, a parameter of no linear layer, "
                    f"which the fsdp engine does not. {_ADVICE}.",
                    key="backend",
                )
            if matched and plan[entry] not in _STYLES:
                fused = ", several projections in one matrix" if entry.endswith(_FUSED) else ""
                raise ConfigError(
                    f"tensor parallelism of model type {self.kind!r} needs the style {plan[entry]!r} (for {entry}"
                    f"{fused}), which the fsdp engine does not have; it has {', '.join(_STYLES)}. {_ADVICE}.",
                    key="backend",
                )
        styles = {name: plan[entry] for entry, matched in matches.items() for name in matched}
        found = [(module, styles[name]) for name, module in modules.items() if name in styles]
        if not found:
            raise ConfigError(
                f"no layer of model type {self.kind!r} matches its tensor-parallel plan. {_ADVICE}.", key="backend"
            )
        return found

    def _blocks(self, decoder: nn.Module, styles: list[tuple[nn.Module, str]]) -> list[nn.Module]:
        members: dict[str, set[str]] = {}
        for module, style in styles:
            members.setdefault(self.names[id(module)].rpartition(".")[0], set()).add(style)
        for name, inside in members.items():
            if not {"colwise", "rowwise"} <= inside:
                raise ConfigError(
                    f"{name} of model type {self.kind!r} has only {' and '.join(sorted(inside))} layers in "
                    f"the tensor-parallel plan; a block needs colwise and rowwise ones. {_ADVICE}.",
                    key="backend",
                )
        return [self.model.get_submodule(name) for name in members]

    def _rest(self, blocks: list[nn.Module], after_gather: nn.Module | None) -> None:
        """Everything that no style covers: replicated, outside the blocks only."""
        within = tuple(f"{self.names[id(block)]}." for block in blocks)
        for module in list(self.model.modules()):
            own = [n for n, p in module._parameters.items() if p is not None and id(p) not in self.placed]
            if not own or any(isinstance(module._parameters[n], DTensor) for n in own):
                continue
            name = self.names[id(module)]
            if name.startswith(within):
                raise ConfigError(
                    f"the tensor-parallel plan of model type {self.kind!r} says nothing of {name}.{own[0]}, "
                    f"which lies inside a split block. {_ADVICE}.",
                    key="backend",
                )
            is_head = after_gather is not None and (name == "score" or name.startswith("score."))
            partial = self.sequence_parallel and not is_head
            if partial and "Norm" not in type(module).__name__:
                raise ConfigError(
                    f"{name} of model type {self.kind!r} is no norm, so it is not known to "
                    "work on a part of the tokens. Set it to false.",
                    key="fsdp.sequence_parallel",
                )
            self._place(module, {n: Replicate() for n in own})
            _run_locally(module, Partial() if partial else None)

    # ------------------------------------------------------------------------------------------------ the styles

    def _whole_input(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return (self._whole(args[0]), *args[1:]), kwargs
        if not isinstance(kwargs.get("hidden_states"), torch.Tensor):
            raise RuntimeError(
                f"{type(block).__name__} of model type {self.kind!r} gets its input neither as first argument nor as "
                "hidden_states, so tensor parallelism cannot split it"
            )
        return args, {**kwargs, "hidden_states": self._whole(kwargs["hidden_states"])}

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            return gather_rows(x[0], self.group, partial=True)[None]
        return copy_to_group(x, self.group)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            return scatter_rows(x[0], self.group)[None]
        return reduce_from_group(x, self.group)

    def _colwise(self, module: nn.Module, even: bool = True) -> None:
        """Output features are split."""
        for part in _leaves(module):
            if _is_lora(part):
                self._colwise(part.base_layer, even)
                for name in part.lora_A:
                    self._replicated(part.lora_A[name], Partial())
                    self._colwise(part.lora_B[name], even)
                continue
            self._check_linear(part, 0, even)
            self._place(part, {"weight": Shard(0), "bias": Shard(0)})
            _run_locally(part)

    def _rowwise(self, module: nn.Module) -> None:
        """Input features are split; the outputs are partial sums, which are added up."""
        for part in _leaves(module):
            if _is_lora(part):
                self._rowwise(part.base_layer)
                for name in part.lora_A:
                    self._rowwise(part.lora_A[name])
                    self._replicated(part.lora_B[name], Partial() if self.sequence_parallel else None)
                continue
            self._check_linear(part, 1, True)
            self._place(part, {"weight": Shard(1), "bias": Replicate()})
            self._run_rowwise(part)

    def _run_rowwise(self, module: Any) -> None:
        original = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            bias = module._parameters.get("bias")
            with _local_parameters(module):
                if bias is not None:  # once, not on every rank
                    module._parameters["bias"] = None
                out = self._summed(original(x))
            if bias is not None:
                grads = [Partial()] if self.sequence_parallel else None
                out = out + bias.to_local(grad_placements=grads)
            return out

        module.forward = forward

    def _per_head(self, module: nn.Module) -> None:
        """The same weight for every head, of which each rank has some: gradients add up."""
        self._replicated(module, Partial())

    def _replicated(self, module: nn.Module, grads: Placement | None) -> None:
        self._place(module, {name: Replicate() for name in module._parameters})
        _run_locally(module, grads)

    def _vocab_embedding(self, module: Any) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            raise ConfigError(
                f"the input embedding of model type {self.kind!r} is a {type(module).__name__}, which tensor "
                f"parallelism cannot split. {_ADVICE}.",
                key="backend",
            )
        start, end = vocab_range(module.weight.shape[0], self.rank, self.ranks)
        self._place(module, {"weight": Shard(0)})
        original, padding = module.forward, module.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < end else None

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            mine = (input_ids >= start) & (input_ids < end)
            with _local_parameters(module):
                if end == start:  # a weight of no rows
                    out = module.weight.new_zeros(*input_ids.shape, module.embedding_dim) + module.weight.sum()
                else:
                    module.padding_idx = local_padding
                    try:
                        out = original(torch.where(mine, input_ids - start, 0))
                    finally:
                        module.padding_idx = padding
            return self._summed(out * mine[..., None])

        module.forward = forward

    # ------------------------------------------------------------------------------------------------ parameters

    def _check_linear(self, module: Any, dim: int, even: bool) -> None:
        name = self.names.get(id(module), type(module).__name__)
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None:
            raise ConfigError(
                f"tensor parallelism cannot split {name}, a {type(module).__name__}; only linear layers. {_ADVICE}.",
                key="backend",
            )
        if even and weight.shape[dim] % self.ranks:
            raise ConfigError(
                f"t{self.ranks} cannot split the {weight.shape[dim]} features of {name} evenly. {_ADVICE}.",
                key="backend",
            )

    def _place(self, module: nn.Module, placements: dict[str, Placement]) -> None:
        """Replace parameters by DTensors; one that is tied to another stays tied."""
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in self.placed:
                local = parameter.detach()
                if isinstance(placement, Shard):
                    start, end = vocab_range(parameter.shape[placement.dim], self.rank, self.ranks)
                    local = local.narrow(placement.dim, start, end - start).clone()
                sharded = DTensor.from_local(
                    local,
                    self.mesh,
                    [placement],
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                self.placed[id(parameter)] = (nn.Parameter(sharded, requires_grad=parameter.requires_grad), parameter)
            module._parameters[name] = self.placed[id(parameter)][0]


def _is_lora(module: nn.Module) -> Any:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _leaves(module: Any) -> Iterator[Any]:
    """The module itself, or the two that peft keeps of one it trains whole (``modules_to_save``)."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        yield module.original_module
        yield from module.modules_to_save.values()
    else:
        yield module


def _rows_of(head: Any) -> int:
    module = next(_leaves(head))
    return int((module.base_layer if _is_lora(module) else module).weight.shape[0])


@contextmanager
def _local_parameters(module: nn.Module, grads: Placement | None = None) -> Iterator[None]:
    live = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, parameter in live.items():
        local: Any = parameter.to_local(grad_placements=[grads] if grads is not None else None)
        module._parameters[name] = local
    try:
        yield
    finally:
        module._parameters.update(live)


def _run_locally(module: nn.Module, grads: Placement | None = None) -> None:
    """Let the module's forward see the local shards of its parameters.

    Args:
        grads: what the gradient of a local shard is for the parameter; None: the same placement.
    """
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _local_parameters(module, grads):
            return original(*args, **kwargs)

    module.forward = forward
