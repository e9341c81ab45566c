"""What travels between workflows, engines and trainers: requests, responses, trajectories, and metadata.

**The log-prob of a token** means one thing everywhere in the framework: for token ``x_t`` after ``x_<t``,

    log p(x_t | x_<t) = log_softmax(logits_t / T)[x_t],    computed in fp32,

over the *whole* vocabulary, where ``T`` is the sampling temperature (``T = 1`` when ``greedy`` or ``temperature = 0``).
It is taken before top-k, top-p and min-p truncation, and it is what an inference engine returns in
``output_logprobs`` and what a train engine computes in ``forward`` and ``train_batch``. Per-token arrays are aligned
with the token itself: entry ``i`` belongs to token ``i``. Nothing is shifted outside an engine.

Where a token comes with its *support* ``S`` (the ids that truncation had kept, see ``areal_core.api.supports``), both
sides take the log-prob over ``S`` instead: ``log softmax(logits_t[S] / T)[x_t]``, the probability it was drawn with.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from areal_core.api.supports import MAX_SUPPORT, Supports, join
from areal_core.config.fields import option
from areal_core.errors import BadInputError

StopReason = Literal["stop", "length", "tool_calls", "abort", "interrupt"]


@attrs.define(kw_only=True)
class GenerationHyperparameters:
    """How completions are sampled."""

    n_samples: int = option(1, "Samples per prompt: the group size of group-normalised algorithms.", ge=1)
    max_new_tokens: int = option(512, "Most tokens to generate.", ge=1)
    min_new_tokens: int = option(0, "Stop tokens are not sampled before this many tokens.", ge=0)
    max_tokens: int | None = option(None, "Most tokens of prompt and completion together; None: the context.", ge=1)
    greedy: bool = option(False, "Take the most likely token; temperature is ignored.")
    temperature: float = option(1.0, "Softmax temperature; 0 means greedy.", ge=0)
    top_p: float = option(
        1.0, "Nucleus sampling: smallest set of tokens with this much mass; training: with top_k.", gt=0, le=1
    )
    top_k: int = option(0, "Sample among the k most likely tokens; 0: all. In training at most 1024.", ge=0)
    min_p: float = option(
        0.0, "Drop tokens less likely than this share of the likeliest; training: with top_k.", ge=0, le=1
    )
    stop_token_ids: list[int] = option(factory=list, help="Ids that end a completion, beside the tokenizer's EOS.")
    stop: list[str] = option(factory=list, help="Strings that end a completion.")
    ignore_eos: bool = option(False, "Do not stop at the end-of-sequence token.")
    seed: int | None = option(None, "Seed of this request; None: derived from the run's seed and the episode.")
    frequency_penalty: float = option(0.0, "Penalty on tokens by how often they occurred.", ge=-2, le=2)

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    @property
    def effective_temperature(self) -> float:
        """The temperature of the framework's log-prob definition: 1 when decoding greedily."""
        return 1.0 if self.is_greedy else self.temperature

    @property
    def has_bounded_support(self) -> bool:
        """Whether sampling keeps no more tokens than an engine may be asked for, see ``ModelRequest``."""
        return 0 < self.top_k <= MAX_SUPPORT and not self.is_greedy

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with some fields changed."""
        return attrs.evolve(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy whose ``stop_token_ids`` also hold the tokenizer's EOS and pad ids (unless ``ignore_eos``)."""
        ids = list(self.stop_token_ids)
        if not self.ignore_eos:
            for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
                if token_id is not None and token_id not in ids:
                    ids.append(token_id)
        return self.new(stop_token_ids=ids)


_rid_prefix = uuid.uuid4().hex
_rid_numbers = itertools.count()


def _renew_rid_prefix() -> None:
    global _rid_prefix
    _rid_prefix = uuid.uuid4().hex


# Counted, because the randomness of a UUID costs a system call. A forked process goes on from the same count.
os.register_at_fork(after_in_child=_renew_rid_prefix)


@attrs.define(kw_only=True, eq=False)
class ModelRequest:
    """One completion to generate.

    Attributes:
        input_ids: prompt token ids.
        gconfig: sampling parameters; ``n_samples`` must be 1.
        rid: unique id of the request.
        metadata: carried through untouched (e.g. ``{"episode_id": ...}`` for routing affinity).
        tokenizer: needed only for stop strings.
        image_data: for vision-language models: the images, in the order of their placeholders in ``input_ids``, which
            holds as many of them as the model has features (what its processor writes).
        processor: the model's transformers processor; it turns ``image_data`` into tensors.
        return_supports: also give ``output_supports``, and log-probs over them; ``gconfig.has_bounded_support`` holds.
            Only an engine that ``returns_supports`` may be asked for it; the controller does so for training.
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = attrs.field(factory=GenerationHyperparameters)
    rid: str = attrs.field(factory=lambda: f"{_rid_prefix}-{next(_rid_numbers)}")
    metadata: dict[str, Any] = attrs.field(factory=dict)
    tokenizer: Any = None
    image_data: list[Any] | None = None
    processor: Any = None
    return_supports: bool = False

    def room_for_completion(self, context: int | None, name: str = "the context") -> int:
        """Most tokens that may be generated, by ``gconfig`` and the engine's context.

        Args:
            context: tokens of prompt and completion; None: no bound.
            name: of the context, for the error.

        Raises:
            BadInputError: if the prompt leaves no room.
        """
        size, most = len(self.input_ids), self.gconfig.max_new_tokens
        for limit, what in ((self.gconfig.max_tokens, "max_tokens"), (context, name)):
            if limit is None:
                continue
            if size >= limit:
                raise BadInputError(
                    f"the prompt has {size} tokens, which leaves no room for a completion: {what} is {limit}, "
                    f"so a prompt may have at most {limit - 1} (max_new_tokens={self.gconfig.max_new_tokens}). "
                    f"max_length of the dataset (train_dataset.max_length) drops longer rows"
                )
            most = min(most, limit - size)
        return most


@attrs.define(kw_only=True, eq=False)
class ModelResponse:
    """One completion.

    Attributes:
        input_tokens: the prompt's ids, as sent.
        output_tokens: generated ids, the stop token included when one was sampled.
        output_logprobs: log-prob of each generated token under the framework's definition (see this module).
        output_versions: weight version that produced each token.
        output_supports: int32 ``[number of output_tokens, K]`` if the request asked for it, else None.
        stop_reason: ``stop`` (a stop id or string), ``length``, ``tool_calls``, ``abort`` (cancelled) or
            ``interrupt`` (the engine gave up its partial result on a weight update; the caller may go on from it).
        latency, ttft: seconds to the whole answer and to its first token.
    """

    input_tokens: list[int] = attrs.field(factory=list)
    output_tokens: list[int] = attrs.field(factory=list)
    output_logprobs: list[float] = attrs.field(factory=list)
    output_versions: list[int] = attrs.field(factory=list)
    output_supports: Supports | None = None
    stop_reason: StopReason = "stop"
    latency: float = 0.0
    ttft: float = 0.0
    metadata: dict[str, Any] = attrs.field(factory=dict)

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def truncated(self) -> bool:
        return self.stop_reason == "length"


def _int64(value: Any) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(value, dtype=np.int64)


def _int32(value: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(value, dtype=np.int32)


def _float32(value: Any) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(value, dtype=np.float32)


def _supports(value: Any) -> Supports | None:
    return None if value is None else _int32(value)


def _bool(value: Any) -> npt.NDArray[np.bool_]:
    return np.ascontiguousarray(value, dtype=np.bool_)


@attrs.define(kw_only=True, eq=False)
class Trajectory:
    """One finished sequence: the tokens exactly as they were sampled, and its reward.

    All arrays have the length ``L`` of the whole sequence, prompt included; entry ``i`` belongs to token ``i``.

    Attributes:
        input_ids: int64 ``[L]``.
        loss_mask: bool ``[L]``; true where the model sampled the token and is trained on it.
        logprobs: float32 ``[L]``; the sampler's log-prob where ``loss_mask``, else 0.
        versions: int32 ``[L]``; the weight version that sampled the token, -1 where not ``loss_mask``.
        supports: int32 ``[L, K]`` or None: what the sampler had kept when it drew the token, see
            ``areal_core.api.supports``. Not written to ``trajectories/``.
        reward: the scalar that is optimised.
        rewards: the named rewards it was made of, unweighted; filled from a ``Score`` given as ``reward``.
        token_rewards: float32 ``[L]`` or None: rewards at single tokens, beside ``reward`` (which sits at the last
            trained token).
        group_id: trajectories of one prompt share it. Set by the controller.
        stop_reason: of the last completion.
        n_turns: number of completions in it.
        latency: seconds the engine took for its completions together; None: not known.
        ttft: seconds from its first request to that request's first token; None: not known.
        metadata: free, JSON-compatible; written to ``trajectories/``.
        multi_modal_input: the tensors of the sequence's images by the model's own names (see ``PackedBatch``); empty
            for text. Samples of a prompt should share one mapping. Only the shapes are written to ``trajectories/``.
    """

    input_ids: npt.NDArray[np.int64] = attrs.field(converter=_int64)
    loss_mask: npt.NDArray[np.bool_] = attrs.field(converter=_bool)
    logprobs: npt.NDArray[np.float32] = attrs.field(converter=_float32)
    versions: npt.NDArray[np.int32] = attrs.field(converter=_int32)
    reward: float = 0.0
    rewards: dict[str, float] = attrs.field(factory=dict)
    token_rewards: npt.NDArray[np.float32] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_float32)
    )
    group_id: str = ""
    stop_reason: StopReason = "stop"
    n_turns: int = 1
    latency: float | None = None
    ttft: float | None = None
    metadata: dict[str, Any] = attrs.field(factory=dict)
    multi_modal_input: Mapping[str, Any] = attrs.field(factory=dict)
    supports: Supports | None = attrs.field(default=None, converter=_supports)

    def __attrs_post_init__(self) -> None:
        length = len(self.input_ids)
        for name in ("loss_mask", "logprobs", "versions", "token_rewards"):
            value = getattr(self, name)
            if value is not None and value.shape != (length,):
                raise ValueError(f"Trajectory.{name} has shape {value.shape}, but input_ids has length {length}")
        if self.supports is not None and (self.supports.ndim != 2 or len(self.supports) != length):
            raise ValueError(
                f"Trajectory.supports has shape {self.supports.shape}, but input_ids has length {length}: it must be "
                f"[{length}, K]"
            )
        # By its attribute and not its class: this module stays free of the machinery of rewards.
        terms = getattr(self.reward, "terms", None)
        if terms is not None:
            self.rewards = self.rewards or dict(terms)
            self.reward = float(self.reward)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens before the first trained one; the whole length when none is trained."""
        trained = np.flatnonzero(self.loss_mask)
        return int(trained[0]) if len(trained) else len(self)

    @property
    def first_version(self) -> int:
        """Oldest weight version among the sampled tokens; -1 when nothing was sampled."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if len(sampled) else -1

    @classmethod
    def from_response(cls, response: ModelResponse, reward: float = 0.0, **fields: Any) -> Trajectory:
        """A single-turn trajectory: the prompt, then the completion."""
        n_tokens = len(response.output_tokens)
        if (
            cls is Trajectory
            and type(reward) is float
            and fields.keys() <= _FREE_FIELDS
            and len(response.output_logprobs) == len(response.output_versions) == n_tokens
        ):
            return _single_turn(response, reward, **fields)
        return cls.from_turns([response], reward, **fields)

    @classmethod
    def from_turns(cls, responses: Sequence[ModelResponse], reward: float = 0.0, **fields: Any) -> Trajectory:
        """One trajectory of several turns. Each prompt must begin with all tokens before it, sampled ids included.

        Raises:
            ValueError: if a turn's prompt re-encoded earlier tokens instead of extending them.
        """
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        supports: list[tuple[Supports | None, int]] = []
        for turn, response in enumerate(responses):
            if response.input_tokens[: len(ids)] != ids:
                raise ValueError(
                    f"turn {turn}: the prompt does not begin with the {len(ids)} tokens so far. "
                    "Extend the sampled ids; do not decode and encode them again."
                )
            new_prompt = response.input_tokens[len(ids) :]
            ids = [*response.input_tokens, *response.output_tokens]
            mask += [False] * len(new_prompt) + [True] * response.output_len
            logprobs += [0.0] * len(new_prompt) + list(response.output_logprobs)
            versions += [-1] * len(new_prompt) + list(response.output_versions)
            supports += [(None, len(new_prompt)), (response.output_supports, response.output_len)]
        return cls(
            input_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            supports=join(supports),
            reward=reward,
            stop_reason=responses[-1].stop_reason if responses else "abort",
            n_turns=len(responses),
            latency=sum(response.latency for response in responses) or None,
            ttft=(responses[0].ttft or None) if responses else None,
            **fields,
        )


_FREE_FIELDS = frozenset({"metadata", "rewards", "multi_modal_input"})
_INT64, _INT32, _FLOAT32, _BOOL = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


class _Unconverted(Trajectory):
    """While it is filled: without the conversion of what is assigned."""

    __slots__ = ()
    __setattr__ = object.__setattr__


def _single_turn(
    response: ModelResponse,
    reward: float,
    metadata: dict[str, Any] | None = None,
    rewards: dict[str, float] | None = None,
    multi_modal_input: Mapping[str, Any] | None = None,
) -> Trajectory:
    # What Trajectory.from_turns makes of one response, four times as fast: arrays are born with their types.
    prompt, output = response.input_tokens, response.output_tokens
    start = len(prompt)
    trajectory: Trajectory = object.__new__(_Unconverted)
    trajectory.input_ids = np.array([*prompt, *output], _INT64)
    trajectory.loss_mask = np.zeros(start + len(output), _BOOL)
    trajectory.loss_mask[start:] = True
    trajectory.logprobs = np.array([0.0] * start + [*response.output_logprobs], _FLOAT32)
    trajectory.versions = np.array([-1] * start + [*response.output_versions], _INT32)
    trajectory.reward = reward
    trajectory.rewards = {} if rewards is None else rewards
    trajectory.token_rewards = None
    trajectory.group_id = ""
    trajectory.stop_reason = response.stop_reason
    trajectory.n_turns = 1
    trajectory.latency = response.latency or None
    trajectory.ttft = response.ttft or None
    trajectory.metadata = {} if metadata is None else metadata
    trajectory.multi_modal_input = {} if multi_modal_input is None else multi_modal_input
    kept = response.output_supports
    trajectory.supports = None if kept is None else join([(None, start), (kept, len(output))])
    trajectory.__class__ = Trajectory
    return trajectory


@attrs.frozen(kw_only=True)
class FinetuneSpec:
    """How long the training is; schedules need it before the first step."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    total_train_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.dataset_size // self.train_batch_size)

    @property
    def total_steps(self) -> int:
        if self.total_train_steps is not None:
            return self.total_train_steps
        return self.total_train_epochs * self.steps_per_epoch


@attrs.frozen(kw_only=True)
class WeightUpdateMeta:
    """One way to bring new weights from a train engine to an inference engine.

    Attributes:
        type: ``memory`` (engine in the same process), ``disk`` (safetensors), ``distributed`` (broadcast), or
            ``lora`` (adapter only).
        path: the folder, for ``disk`` and ``lora``.
        version: the version that the weights have.
        chunk_mb: size of a broadcast bucket in MiB.
        options: what a backend needs beyond this (master address, group name, ...).
    """

    type: Literal["memory", "disk", "distributed", "lora"] = "memory"
    path: Path | None = None
    version: int = 0
    chunk_mb: int = 256
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SaveLoadMeta:
    """What to save or load, and where.

    Attributes:
        path: a folder. On save it must not exist or be empty; the caller renames it into place.
        weight_format: ``hf`` (safetensors in Hugging Face layout, loads in transformers) or ``dcp``
            (torch.distributed.checkpoint; resumes training, across layouts).
        with_optim: optimizer and scheduler too (``dcp`` only).
        tokenizer: saved beside the weights with ``hf``.
        background: ``dcp`` only: the engine may go on while the files are written; see ``TrainEngine.finish_saving``.
    """

    path: Path
    weight_format: Literal["hf", "dcp"] = "hf"
    with_optim: bool = False
    tokenizer: Any = None
    background: bool = False
