"""The two engine contracts: one generates, one trains."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.api.batch import LossOutput, PackedBatch, TokenOutput
from areal_core.api.io_struct import (
    FinetuneSpec,
    ModelRequest,
    ModelResponse,
    SaveLoadMeta,
    WeightUpdateMeta,
)
from areal_core.errors import BadInputError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from areal_core.api.alloc import ParallelStrategy
    from areal_core.api.check_api import Check
    from areal_core.api.configs import InferenceEngineConfig, TrainEngineConfig

#: ``loss_fn(output, micro_batch) -> LossOutput`` whose ``loss`` is a sum over the micro-batch.
LossFn = Callable[[TokenOutput, PackedBatch], LossOutput]
#: ``logits_fn(micro_batch, logits, index)``: one number for each of some tokens, fp32 ``[C]``, of their logits over the
#: temperature, fp32 ``[C, V]``; ``index`` int64 ``[C]`` is where they stand in the micro-batch.
LogitsFn = Callable[[PackedBatch, "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
#: ``loss_weight_fn(micro_batch) -> scalar tensor``: what the micro-batch counts for, e.g. its number of loss tokens.
LossWeightFn = Callable[[PackedBatch], "torch.Tensor"]


class InferenceEngine(abc.ABC):
    """Generates completions, asynchronously, with weights that can be replaced while it runs.

    Constructed as ``Engine(config: InferenceEngineConfig)``; its own options are ``config.options``. All methods but
    ``agenerate`` may block and are called from the trainer's thread; ``agenerate`` is called from an event loop.

    Attributes:
        takes_adapters: whether ``update_weights_from_disk`` takes a LoRA adapter in peft's layout (its folder is
            ``meta.path``) when ``meta.type`` is ``lora``.
        returns_supports: whether it answers ``request.return_supports``: with the ids that top-k, top-p and min-p kept
            (at most ``top_k``, the sampled one among them), and log-probs over them. Without it no training truncates.
    """

    takes_adapters: ClassVar[bool] = False
    returns_supports: ClassVar[bool] = False

    @classmethod
    def diagnose(cls, config: InferenceEngineConfig) -> list[Check]:
        """What ``areal doctor CONFIG`` says of this engine: is there what it needs, e.g. the servers, and what do they
        offer. Starts nothing, takes seconds at most, and does not raise.
        """
        return []

    @abc.abstractmethod
    def initialize(self, model_path: str, tokenizer: Any = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Load the model (a Hugging Face folder) or connect to servers. Ready for requests on return."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free everything; running requests end with ``stop_reason="abort"``. May be called twice."""

    @abc.abstractmethod
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one completion.

        Cancelling the awaiting task aborts the request. Requests with equal prompts that wait at the same time share
        their prefill. With ``request.gconfig.seed`` set, the sample depends on that seed and the weights alone, not on
        what else runs.

        Raises:
            BadInputError: if prompt and completion cannot fit the context, or an option cannot be honoured.
        """

    @abc.abstractmethod
    def pause_generation(self) -> None:
        """Stop between two tokens; returns when no token is being computed. Requests stay and wait."""

    @abc.abstractmethod
    def continue_generation(self) -> None:
        """Go on after ``pause_generation``."""

    def update_weights_from_memory(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over weights from the same process. Call between pause and continue.

        Args:
            tensors: (name in Hugging Face layout, full tensor); every parameter once, tied ones under one name. The
                engine never writes into them. Where nothing generates during an optimizer step
                (``max_head_offpolicyness`` 0) it may read them in place until the next update.
            version: the version of tokens generated from now on.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take weights from memory")

    @abc.abstractmethod
    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> None:
        """Load safetensors in Hugging Face layout from ``meta.path``. On any error the old weights stay.

        With ``meta.type`` ``lora`` the folder holds an adapter for the model that the engine was initialised with.
        """

    def weight_receivers(self) -> tuple[str, ...]:
        """One name for each process that joins the group of ``init_weights_update_group``, in the order of their ranks.

        Other names than before (a server came or went) mean that the group must be made anew. Empty: the engine takes
        no weights over a process group.
        """
        return ()

    def init_weights_update_group(self, meta: WeightUpdateMeta) -> None:
        """Let the receivers join the group that ``update_weights_from_distributed`` receives on, as ranks 1 and up.

        ``meta.options`` says where rank 0 waits (see ``areal_core.api.weight_sender``). Returns when all have joined.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take weights over a process group")

    def update_weights_from_distributed(
        self,
        meta: WeightUpdateMeta,
        specs: list[tuple[str, list[int], str]],
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Receive the tensors of ``specs`` by broadcast from the train engine. Returns when all are in use.

        They come in this order as buckets of bytes, one tensor behind the other; a bucket ends with the tensor that
        brings it beyond ``meta.chunk_mb``.

        Args:
            specs: (name in Hugging Face layout, shape, dtype as torch spells it, such as ``bfloat16``); every
                parameter once, tied ones under one name.
            on_ready: called when the receivers wait for the first bucket. Before it, an error leaves the old weights.

        Raises:
            BadInputError: before ``on_ready``, if the tensors are not those of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take weights over a process group")

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Version that tokens generated from now on carry."""

    @abc.abstractmethod
    def get_version(self) -> int: ...

    def launch_server(self, server_args: Mapping[str, Any] | None = None) -> list[str]:
        """Start the servers this engine talks to; returns their addresses. In-process engines return ``[]``."""
        return []

    def teardown_server(self) -> None:  # noqa: B027 - nothing to do for in-process engines
        """Stop what ``launch_server`` started."""

    def offload(self) -> None:  # noqa: B027
        """Free device memory until ``onload``; no request may run."""

    def onload(self) -> None:  # noqa: B027
        """Undo ``offload``."""

    def export_stats(self) -> dict[str, float]:
        """Counters and gauges since the last call, e.g. ``generated_tokens``, ``prefill_tokens``."""
        return {}


class TrainEngine(abc.ABC):
    """Trains one model over all ranks of its mesh. Every method is called by every rank (SPMD).

    Constructed as ``Engine(config: TrainEngineConfig)``; its own options are ``config.options``.

    Attributes:
        takes_supports: whether log-probs and entropies are those over ``batch["supports"]`` for tokens that have one.
    """

    takes_supports: ClassVar[bool] = False

    @abc.abstractmethod
    def create_process_group(self, parallel_strategy: ParallelStrategy) -> None:
        """Join torch.distributed (if launched by torchrun) and build the mesh. Idempotent for the default group."""

    @abc.abstractmethod
    def initialize(self, ft_spec: FinetuneSpec | None = None, *, role: str = "actor") -> None:
        """Load the model, and optimizer and schedule if ``config.optimizer`` is set.

        Args:
            role: ``actor`` or ``ref`` (language-model head) or ``critic`` / ``reward`` (scalar head).
        """

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free the model; leave the default process group alone unless this engine created it."""

    @abc.abstractmethod
    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
        logits_fn: LogitsFn | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the sum of all ranks' shards.

        The gradient is that of ``sum(loss) / sum(weight)`` over every micro-batch of every data-parallel rank,
        whatever the split. A rank may hold an empty batch. If the total weight is 0 the step is skipped.

        Args:
            batch: this data-parallel rank's shard, in host memory.
            loss_fn: sum-loss of one micro-batch, which is on ``device``; may ask for entropy with ``with_entropy``.
            loss_weight_fn: its weight.
            logits_fn: a function of the logits over the whole vocabulary, of which only a chunk of tokens exists at a
                time; its results are ``TokenOutput.of_logits``, with gradient. An engine may refuse it.

        Returns:
            ``loss``, ``grad_norm``, ``lr``, ``update_skipped`` (0 or 1), the loss function's stats, and its maxima as
            ``{name}_max``, equal on every rank.
        """

    @abc.abstractmethod
    def eval_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        with_entropy: bool = False,
        logits_fn: LogitsFn | None = None,
    ) -> dict[str, float]:
        """As ``train_batch``, without gradient or step: ``loss`` and the stats."""

    @abc.abstractmethod
    def forward(self, batch: PackedBatch, *, with_entropy: bool = False) -> TokenOutput:
        """Log-probs (critics: values) of this rank's shard, aligned with its tokens, no gradient."""

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        """``[T, H]``: the state that each trained token of this rank's shard is predicted from, no gradient.

        Raises:
            BadInputError: if the engine cannot give it.
        """
        raise BadInputError(f"{type(self).__name__} gives no hidden states; use another engine, such as fsdp.")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 ``[S, V]``: the logits, over the temperature, of some of the ``hidden_states`` ``[S, H]``; no gradient.

        Every rank has called ``hidden_states`` before. The ranks of tensor parallelism call this together, with equal
        states; else the call is local.
        """
        raise BadInputError(f"{type(self).__name__} gives no logits; use another engine, such as fsdp.")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Within it, the model is the one that its LoRA adapter was added to: the reference, without a second copy.

        Raises:
            BadInputError: if the engine has no adapters.
        """
        raise BadInputError(f"actor.lora: {type(self).__name__} cannot switch its adapter off; give `ref`.")

    @abc.abstractmethod
    def lr_scheduler_step(self) -> None:
        """Advance the learning-rate schedule by one training step."""

    @abc.abstractmethod
    def connect_engine(self, engine: InferenceEngine | None, meta: WeightUpdateMeta) -> None:
        """Name the engine that ``update_weights`` feeds: on global rank 0; None on the others."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the current weights to the connected engine. The caller has paused it and sets its version."""

    @abc.abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write weights (``hf``) or the whole training state (``dcp``) to ``meta.path``.

        With ``meta.background`` an engine may return as soon as it holds a copy: the files are complete when
        ``finish_saving`` has returned.
        """

    @property
    def is_saving(self) -> bool:
        """Whether this rank still writes what it was told to save in the background."""
        return False

    def finish_saving(self) -> None:  # noqa: B027 - nothing to do for an engine that saves in the foreground
        """Wait for the save in the background, if there is one. Collective.

        Raises:
            ArealError: on every rank, if it failed on any.
        """

    @classmethod
    def convert(cls, source: Path, target: Path, *, to: str, config: TrainEngineConfig, role: str) -> None:
        """Write weights in the other format, without a process group: what ``areal convert`` calls.

        Args:
            source: what ``save`` wrote (``dcp``), or any Hugging Face folder.
            target: an empty folder.
            to: ``hf`` (adapters merged) or ``dcp`` (weights alone).
            config: of the model; its ``path`` is where the architecture and the tokenizer are.
            role: as in ``initialize``.

        Raises:
            BadInputError: if the engine cannot, or a file is missing or does not fit.
        """
        raise BadInputError(f"{cls.__name__} has no checkpoints that can be converted.")

    @abc.abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Read what ``save`` wrote, or for ``hf`` any compatible Hugging Face folder.

        Raises:
            BadInputError: if a file or a tensor is missing or has another shape; the model is unchanged.
        """

    @abc.abstractmethod
    def set_version(self, version: int) -> None: ...

    @abc.abstractmethod
    def get_version(self) -> int: ...

    @abc.abstractmethod
    def train(self, mode: bool = True) -> TrainEngine: ...

    def eval(self) -> TrainEngine:
        return self.train(False)

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def data_parallel_world_size(self) -> int: ...

    @property
    @abc.abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """None in a single process."""

    @property
    @abc.abstractmethod
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that work on the same shard of a batch; None when it is this rank alone."""

    def export_stats(self) -> dict[str, float]:
        """Counters and gauges since the last call, equal on every rank."""
        return {}

    def offload(self, *, keep_logits: bool = False) -> None:  # noqa: B027 - optional
        """Move parameters and optimizer state to host memory; nothing to do for what is there. Local.

        Until ``onload`` the model cannot compute; ``save`` writes its training state (``dcp``) all the same.

        Args:
            keep_logits: ``logits`` goes on working.
        """

    def onload(self) -> None:  # noqa: B027 - optional
        """Undo ``offload``; nothing to do after none. Local."""
