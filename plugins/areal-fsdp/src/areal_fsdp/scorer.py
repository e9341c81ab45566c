"""The module that the engine trains: a transformers model, and what turns its hidden states into token outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from areal_core.api.vision import is_vision_language, placeholders_as_text
from areal_fsdp.attention import ATTENTION_NAME, take_rows
from areal_fsdp.head import Head
from areal_fsdp.layout import ModelInput
from areal_fsdp.linear_logprobs import LOGITS_AT_ONCE, linear_logprobs
from areal_fsdp.support import TokenSupports, support_logprobs
from areal_fsdp.tensor_parallel import TensorParallel
from areal_fsdp.ulysses import Ulysses
from areal_fsdp.vocab_parallel import vocab_parallel_logprobs, whole_vocabulary

#: ``(logits fp32 [C, V], index of the predicted tokens int64 [C]) -> fp32 [C]``.
ChunkFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``log_softmax(logits / temperature)[targets]`` in fp32, and the entropy in nats.

    Args:
        logits: ``[S, V]``.
        targets: int64 ``[S]``.

    Returns:
        fp32 ``[S]`` each.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not with_entropy:
        return -F.cross_entropy(logits, targets, reduction="none"), None
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Scorer(nn.Module):
    """Log-probs (or values) of the predicted tokens of one micro-batch.

    Args:
        model: a transformers ``...ForCausalLM``, or ``...ForSequenceClassification`` with one label for a scalar head.
        is_critic: the head is scalar.
        temperature: of the framework's log-prob definition.
        logits_chunk: as many logits exist at one time as this many tokens have; None: ``LOGITS_AT_ONCE``.
        tensor_parallel: how the model is split over ranks, if it is.
        ulysses: with context parallelism: how attention gets all rows.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_critic: bool,
        temperature: float,
        logits_chunk: int | None = None,
        tensor_parallel: TensorParallel | None = None,
        ulysses: Ulysses | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.ulysses = ulysses
        self.model = model
        self.is_critic = is_critic
        self.temperature = temperature
        self.logits_chunk = logits_chunk
        # Of a model with a vision tower: tower and decoder together.
        self.reads_images = is_vision_language(model.config)
        decoder = model.base_model if self.reads_images else model.get_decoder()
        self.head = Head(model, decoder)
        self.is_packed = getattr(model.config, "_attn_implementation", None) == ATTENTION_NAME

    def forward(
        self,
        inputs: ModelInput,
        with_entropy: bool = False,
        *,
        logits_fn: ChunkFn | None = None,
        hidden_only: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs (critic: values) fp32 ``[S]`` and entropies ``[S]`` of what this rank predicts.

        Where that is nothing: one entry of value 0. Both are over the support of a token that has one.

        Args:
            logits_fn: ``(logits [C, V], token_index [C]) -> [C]`` on chunks; its results take the entropies' place, and
                supports are not looked at.
            hidden_only: give the hidden states ``[S, H]`` that predict instead of log-probs, and None.
        """
        hidden = self._packed_hidden(inputs) if self.is_packed else self._padded_hidden(inputs)
        if self.tensor_parallel is not None:
            hidden = self.tensor_parallel.whole_hidden(hidden, split_head=not self.is_critic)
        # Every rank must run the head and its backward, even with nothing to predict.
        empty = len(inputs.rows) == 0
        rows = torch.zeros(1, dtype=torch.int64, device=hidden.device) if empty else inputs.rows
        targets = rows if empty else inputs.targets
        selected = take_rows(hidden, rows)
        if hidden_only:
            return selected, None
        if self.is_critic:
            out, entropy = self.model.score(selected)[:, 0].float(), None
        else:
            if empty:
                # Something in the place of what ``logits_fn`` gives: other ranks may have tokens to add it up with.
                out, entropy = self._logprobs(selected, targets, with_entropy or logits_fn is not None)
            else:
                out, entropy = self._logprobs(
                    selected, targets, with_entropy, logits_fn, inputs.token_index, inputs.supports
                )
        # A copy: FSDP puts a hook on the output, and warns of a view.
        return out * 0 if empty else out.clone(), entropy

    def _packed_hidden(self, inputs: ModelInput) -> torch.Tensor:
        plan = inputs.plan if self.ulysses is None else attrs.evolve(inputs.plan, ulysses=self.ulysses)
        positions = inputs.position_ids
        common: dict[str, Any] = {
            # [1, M], or [3, 1, M] for positions in time, height and width.
            "position_ids": positions[None] if positions.ndim == 1 else positions[:, None],
            "use_cache": False,
            "areal_plan": plan,
        }
        if inputs.vision is None:
            output = self._decoder()(input_ids=inputs.input_ids[None], **common)
            return output.last_hidden_state[0]
        with placeholders_as_text(self.model, inputs.input_ids[None], inputs.vision.types[None]) as input_ids:
            output = self._decoder()(input_ids=input_ids, **inputs.vision.tensors, **common)
        return output.last_hidden_state[0]

    def _padded_hidden(self, inputs: ModelInput) -> torch.Tensor:
        lengths = torch.tensor(inputs.lengths, device=inputs.input_ids.device)
        real = torch.arange(max(inputs.lengths), device=lengths.device)[None, :] < lengths[:, None]
        input_ids = torch.zeros(real.shape, dtype=torch.int64, device=lengths.device)
        input_ids[real] = inputs.input_ids
        common: dict[str, Any] = {"attention_mask": real.long(), "use_cache": False}
        if inputs.vision is None:
            output = self._decoder()(input_ids=input_ids, **common)
            return output.last_hidden_state[real]
        types = torch.zeros_like(input_ids)
        types[real] = inputs.vision.types
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(self._decoder().forward).parameters:
                common[name] = types
        with placeholders_as_text(self.model, input_ids, types) as input_ids:
            output = self._decoder()(input_ids=input_ids, **inputs.vision.tensors, **common)
        return output.last_hidden_state[real]

    def _decoder(self) -> nn.Module:
        return self.model.get_submodule(self.head.decoder_name)

    def _logprobs(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        with_entropy: bool,
        logits_fn: ChunkFn | None = None,
        token_index: torch.Tensor | None = None,
        supports: TokenSupports | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Of one rank; all of them must go the same way.
        ranks = 1 if self.tensor_parallel is None else self.tensor_parallel.ranks
        vocabulary = -(-self.model.config.get_text_config().vocab_size // ranks)
        entries = LOGITS_AT_ONCE if self.logits_chunk is None else self.logits_chunk * vocabulary
        tokens = max(1, entries // vocabulary)
        index = targets if token_index is None else token_index
        if len(hidden) <= tokens:
            return self._head(hidden, targets, with_entropy, logits_fn, index, supports)
        linear = self.head.linear(hidden) if logits_fn is None and supports is None else None
        if linear is not None:
            return linear_logprobs(
                hidden,
                linear.weight,
                targets,
                after=linear.after,
                temperature=self.temperature,
                with_entropy=with_entropy,
                entries=entries,
                **self._part_of_vocabulary(),
            )
        split = [tensor.split(tokens) for tensor in (hidden, targets, index)]
        kept = [None] * len(split[0]) if supports is None else supports.split(tokens)
        chunks = zip(*split, kept, strict=True)
        if torch.is_grad_enabled():
            parts = [
                checkpoint(self._head, h, t, with_entropy, logits_fn, i, s, use_reentrant=False)
                for h, t, i, s in chunks
            ]
        else:
            parts = [self._head(h, t, with_entropy, logits_fn, i, s) for h, t, i, s in chunks]
        logprobs = torch.cat([part[0] for part in parts])
        return logprobs, torch.cat([part[1] for part in parts]) if with_entropy or logits_fn else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, V]`` of hidden states ``[S, H]``; ranks of tensor parallelism call this together, with equal rows."""
        logits = self.head.logits(hidden)
        parallel = self.tensor_parallel
        return logits if parallel is None else whole_vocabulary(logits, parallel.vocab_size, parallel.group)

    def _part_of_vocabulary(self) -> dict[str, Any]:
        """With tensor parallelism: where this rank's part starts, and the ranks that have the others."""
        parallel = self.tensor_parallel
        return {} if parallel is None else {"start": parallel.vocab_start, "group": parallel.group}

    def _head(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        with_entropy: bool,
        logits_fn: ChunkFn | None,
        token_index: torch.Tensor,
        supports: TokenSupports | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if logits_fn is not None:
            scaled = self.logits(hidden).float() / self.temperature
            return token_logprobs(scaled, targets, 1.0, False)[0], logits_fn(scaled, token_index)
        logits = self.head.logits(hidden)
        if supports is None:
            return self._over_vocabulary(logits, targets, with_entropy)
        logprobs, entropy = support_logprobs(
            logits,
            targets,
            supports.ids,
            temperature=self.temperature,
            with_entropy=with_entropy,
            **self._part_of_vocabulary(),
        )
        if supports.full is None:
            return logprobs, entropy
        whole, whole_entropy = self._over_vocabulary(logits, targets, with_entropy)
        if entropy is not None and whole_entropy is not None:
            entropy = torch.where(supports.full, whole_entropy, entropy)
        return torch.where(supports.full, whole, logprobs), entropy

    def _over_vocabulary(
        self, logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.tensor_parallel is not None:
            return vocab_parallel_logprobs(
                logits,
                targets,
                temperature=self.temperature,
                with_entropy=with_entropy,
                **self._part_of_vocabulary(),
            )
        return token_logprobs(logits, targets, self.temperature, with_entropy)
