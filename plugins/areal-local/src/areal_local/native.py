"""Native models, which plugins register as model specs: how the engine loads, decodes and updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from areal_core.api.model_api import BaseStateDictAdapter, ModelSpec, find_model_spec, load_model_spec
from areal_core.api.packed_attention import PackedAttention
from areal_core.errors import BadInputError
from areal_core.logging import getLogger
from areal_local.attention import Pass, UnsupportedModelError
from areal_local.decoder import Decoder, SlottedDecoder, check_decoder, short_sequences
from areal_local.weights import WeightTable, read_safetensors

_logger = getLogger("LocalDecoder")

_KEY = "rollout.local.model_spec"


class NativeModel(nn.Module):
    """A native model and what a checkpoint says of it.

    Attributes:
        model: the ``BaseArchonModel``.
        adapter: between its names and Hugging Face's.
        config, generation_config: of the checkpoint.
    """

    def __init__(self, model: nn.Module, adapter: BaseStateDictAdapter, config: Any, generation_config: Any) -> None:
        super().__init__()
        self.model = model
        self.adapter, self.config, self.generation_config = adapter, config, generation_config

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, V]`` of packed sequences with these lengths."""
        bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=tokens.device)
        logits: torch.Tensor = self.model(tokens, positions, bounds, max(lengths))
        return logits

    def last_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits ``[n, V]`` after each of the sequences, which are read whole."""
        device = next(self.parameters()).device
        lengths = [len(ids) for ids in sequences]
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences])
        positions = np.concatenate([np.arange(length) for length in lengths])
        logits = self.logits(torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), lengths)
        return logits[torch.from_numpy(np.cumsum(lengths) - 1).to(device)]


# ------------------------------------------------------------------------------------------------------------ loading


def choose_spec(path: str, name: str | None, *, trust_remote_code: bool) -> ModelSpec | None:
    """The model spec to run a checkpoint with; None: leave it to transformers.

    Args:
        path: folder or hub id.
        name: ``rollout.local.model_spec``; None: a spec registered for a type that transformers does not know.

    Raises:
        BadInputError: if nobody knows the type.
        PluginError: if the spec cannot be used.
    """
    import transformers
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name is not None:
        return load_model_spec(name, _KEY)
    try:
        config, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return None  # transformers says what is wrong with it
    model_type = config.get("model_type")
    if model_type is None or model_type in CONFIG_MAPPING_NAMES:
        return None
    # A folder that brings code of its own may be registered as well: that code is not run.
    spec = None if trust_remote_code and "auto_map" in config else find_model_spec(model_type)
    if spec is None and "auto_map" not in config:
        raise BadInputError(
            f"{path}: neither transformers {transformers.__version__} nor a model spec knows the model type "
            f"{model_type!r}. Install a plugin that registers it, or name one: {_KEY}=package.module:spec."
        )
    return spec


def load_native(path: str, spec: ModelSpec, *, dtype: str | None, device: torch.device) -> NativeModel:
    """The native model of a Hugging Face folder or hub id; ``dtype`` None: that of its config, or of its files.

    Raises:
        BadInputError: if the spec does not read its type or a feature of it, or a weight is missing or does not fit.
    """
    from transformers import GenerationConfig

    config = _read_config(path)
    if config.model_type not in spec.supported_model_types:
        known = ", ".join(sorted(spec.supported_model_types))
        raise BadInputError(
            f"{path}: is of model type {config.model_type!r}; the model spec {spec.name!r} reads {known}"
        )
    args = spec.model_args_class.from_hf_config(config)
    folder = _local_folder(path)
    tensors = read_safetensors(folder)
    with _default_dtype(_choose_dtype(dtype, config, tensors)), torch.device(device):
        model = spec.model_class(args)
    model.init_buffers(device)
    try:
        generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation_config = GenerationConfig.from_model_config(config)
    native = NativeModel(model, spec.state_dict_adapter_class(args, config), config, generation_config)
    weights = NativeWeights(native)
    weights.apply(weights.table.plan(tensors, str(path)))
    return native


def _read_config(path: str) -> Any:
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        plain, _ = PretrainedConfig.get_config_dict(path)
        known = plain.get("model_type") in CONFIG_MAPPING_NAMES
        config = AutoConfig.from_pretrained(path) if known else PretrainedConfig.from_dict(plain)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: its config.json cannot be read: {error}") from error
    if not known:
        config.model_type = plain.get("model_type", "")
    return config


def _local_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))


def _choose_dtype(dtype: str | None, config: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.dtype:
    if dtype is not None:
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    named = getattr(config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named, None)
    if isinstance(named, torch.dtype):
        return named
    return next((tensor.dtype for _, tensor in tensors if tensor.is_floating_point()), torch.float32)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ------------------------------------------------------------------------------------------------------------ weights


class NativeWeights:
    """The weights of a native model, under the names and in the layout of Hugging Face.

    New ones are always copied, since the model may lay them out in another way.
    """

    borrowed = 0

    def __init__(self, native: NativeModel) -> None:
        self.native = native
        names: list[list[str]] = []
        shapes: list[list[int]] = []
        required: list[bool] = []
        self.dtypes: list[torch.dtype] = []
        for aliases, tensor in self._own().values():
            shadow = torch.empty_like(tensor, device="meta")
            # A tied tensor has the names of each of its ends, in whatever order the model lists them.
            converted = [native.adapter.convert_single_to_hf(alias, shadow) for alias in aliases]
            pieces = max(converted, key=len)
            for position, (_, piece) in enumerate(pieces):
                names.append([hf[position][0] for hf in converted if len(hf) == len(pieces)])
                shapes.append(list(piece.shape))
                required.append(isinstance(tensor, nn.Parameter))
                self.dtypes.append(piece.dtype)
        self.table = WeightTable(names, shapes, required)

    def _own(self) -> dict[int, tuple[list[str], torch.Tensor]]:
        """Each tensor of the model that is saved, with all its names."""
        found: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in self.native.model.state_dict(keep_vars=True).items():
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
        return found

    def apply(self, planned: Mapping[int, torch.Tensor]) -> None:
        """Copy tensors that ``table.plan`` has matched. No token may be computed meanwhile.

        Raises:
            BadInputError: if the adapter does not make every parameter of them, or another shape. Nothing is written.
        """
        adapter = self.native.adapter
        given = adapter.from_hf({self.table.names[index][0]: tensor for index, tensor in planned.items()})
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for aliases, own in self._own().values():
            new = next((given[alias] for alias in aliases if given.get(alias) is not None), None)
            if new is None:
                if isinstance(own, nn.Parameter):
                    raise BadInputError(f"{type(adapter).__name__}.from_hf does not make the parameter {aliases[0]!r}")
                continue
            if new.shape != own.shape:
                raise BadInputError(
                    f"{type(adapter).__name__}.from_hf makes {aliases[0]!r} of shape {list(new.shape)}, but the "
                    f"model's has {list(own.shape)}"
                )
            copies.append((own, new))
        with torch.no_grad():
            for own, new in copies:
                own.copy_(new)


# ----------------------------------------------------------------------------------------------------------- decoding


class NativeNetwork:
    """A native model whose ``PackedAttention`` modules call the pass over the slotted cache."""

    def __init__(self, native: NativeModel) -> None:
        self.native = native
        self._current: Pass | None = None
        layers = [module for module in native.model.modules() if isinstance(module, PackedAttention)]
        if not layers:
            raise UnsupportedModelError("it has no PackedAttention")
        self.layers = layers
        for module in layers:
            module.backend = self._attend

    def _attend(
        self,
        attention: PackedAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        tree_attn_meta: Any,
    ) -> torch.Tensor:
        assert self._current is not None
        return self._current.attend(
            attention.layer, query, key, value, attention.scale, attention.window, attention.softcap
        )

    def reserve(self, length: int) -> None:
        pass

    def weights_changed(self) -> None:
        pass

    def logits(
        self, current: Pass, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        self._current = current
        try:
            logits = self.native.logits(tokens, positions, current.lengths)
        finally:
            self._current = None
        return logits if keep is None else logits[keep]


class RecomputingDecoder:
    """Reads every sequence anew for each token: slow, and right for any native model.

    Rows always have the weights of the moment, whatever they were when the row began.
    """

    def __init__(self, native: NativeModel, most_tokens: int) -> None:
        self.native, self.most_tokens = native, most_tokens
        self.rows: dict[int, list[int]] = {}

    def _read(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        chunk: list[Sequence[int]] = []
        for ids in sequences:
            if chunk and sum(map(len, chunk)) + len(ids) > self.most_tokens:
                logits.append(self.native.last_logits(chunk))
                chunk = []
            chunk.append(ids)
        return torch.cat([*logits, self.native.last_logits(chunk)])

    def prefill(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        for ids, targets in zip(sequences, rows, strict=True):
            self.rows.update({row: list(ids) for row in targets})
        return self._read(sequences)

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        sequences = [self.rows[row] for row in range(len(tokens))]
        for ids, token in zip(sequences, tokens.tolist(), strict=True):
            ids.append(token)
        return self._read(sequences)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows.pop(source)

    def clear(self) -> None:
        self.rows.clear()

    def weights_changed(self) -> None:
        pass


def make_native_decoder(
    native: NativeModel, device: torch.device, max_rows: int, prefill_tokens: int, *, slow: bool = False
) -> Decoder:
    """A decoder with a cache if it gives the model's own logits on a short test; else, with a warning, one without."""
    if slow:
        return RecomputingDecoder(native, prefill_tokens)
    sequences = short_sequences(native.config.vocab_size)
    with torch.inference_mode():
        expected = native.last_logits(sequences)
        before = [(m, m.backend) for m in native.model.modules() if isinstance(m, PackedAttention)]
        try:
            network = NativeNetwork(native)
            check_decoder(SlottedDecoder(network, device, expected.dtype, 3, prefill_tokens), sequences, expected)
            return SlottedDecoder(network, device, expected.dtype, max_rows, prefill_tokens)
        except Exception as error:  # any failure inside a foreign model's forward means: not this way
            for module, backend in before:
                module.backend = backend
            reason = str(error) or type(error).__name__
    _logger.warning(
        "%s reads every sequence anew for each token, which is slow: %s. Let its layers attend through "
        "areal_core.api.packed_attention.PackedAttention.",
        type(native.model).__name__,
        reason,
    )
    return RecomputingDecoder(native, prefill_tokens)
