"""Native models, which plugins register as model specs: how the engine loads and updates them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from areal_core.api.model_api import BaseStateDictAdapter, ModelSpec, find_model_spec, load_model_spec
from areal_core.errors import BadInputError, PluginError
from areal_core.plugins import get_plugin_manager
from areal_core.plugins.loading import describe
from areal_local.weights import WeightTable, read_safetensors

_KEY = "rollout.local.model_spec"
_ADVICE = (
    " A native model takes the names and the layout of the checkpoint's files. Where the trainer holds its weights in "
    "another one (the experts of a layer in one tensor, say), set actor.weight_update.type=disk."
)


class NativeModel(nn.Module):
    """A native model and what a checkpoint says of it.

    Attributes:
        model: the ``BaseArchonModel``.
        adapter: between its names and Hugging Face's.
        config, generation_config: of the checkpoint.
        text_config: the part of the config that is about the language model.
        unused: patterns of names that its checkpoint holds and the adapter makes nothing of.
    """

    def __init__(self, model: nn.Module, adapter: BaseStateDictAdapter, config: Any, generation_config: Any) -> None:
        super().__init__()
        self.model = model
        self.adapter, self.config, self.generation_config = adapter, config, generation_config
        self.text_config = text_config(config)
        self.unused: list[str] = []
        self._vocab_size: int | None = getattr(self.text_config, "vocab_size", None)

    @property
    def vocab_size(self) -> int:
        """That of the config; where it names none, the width of the logits."""
        if self._vocab_size is None:
            with torch.inference_mode():
                self._vocab_size = self.last_logits([[0]]).shape[1]
        return self._vocab_size

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        lengths: Sequence[int],
        longest: int,
        rows: int | None = None,
    ) -> torch.Tensor:
        """Logits ``[T, V]`` of packed tokens, ``lengths`` of them from each sequence; positions are below ``longest``.

        Args:
            rows: how many logits are to come, if not one of each token.

        Raises:
            PluginError: if the model gives something else.
        """
        rows = len(tokens) if rows is None else rows
        bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=tokens.device)
        logits: torch.Tensor = self.model(tokens, positions, bounds, longest)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or len(logits) != rows:
            found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise PluginError(
                f"{type(self.model).__name__}.forward gives {found} for {rows} packed tokens. It must give logits of "
                f"shape [{rows}, vocabulary]."
            )
        return logits

    def last_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits ``[n, V]`` after each of the sequences, which are read whole."""
        device = next(self.parameters()).device
        lengths = [len(ids) for ids in sequences]
        tokens = torch.from_numpy(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]))
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
        logits = self.logits(tokens.to(device), positions.to(device), lengths, max(lengths))
        return logits[torch.from_numpy(np.cumsum(lengths) - 1).to(device)]


# ------------------------------------------------------------------------------------------------------------ loading


def choose_spec(path: str, name: str | None, *, trust_remote_code: bool) -> ModelSpec | None:
    """The model spec to run a checkpoint with; None: leave it to transformers.

    Args:
        path: folder or hub id.
        name: ``rollout.local.model_spec``; None: a spec registered for a type that transformers does not bring.

    Raises:
        BadInputError: if nobody knows the type.
        PluginError: if the spec cannot be used.
    """
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
    # Somebody may have told transformers of the type at run time (AutoConfig.register).
    if spec is None and "auto_map" not in config and model_type not in CONFIG_MAPPING:
        listed = get_plugin_manager().list_absent(model_type)
        raise BadInputError(
            f"{path}: neither transformers {transformers.__version__} nor a model spec knows the model type "
            f"{model_type!r}. Install a plugin that registers it, or name one: {_KEY}=package.module:spec.{listed}"
        )
    return spec


def load_native(path: str, spec: ModelSpec, *, dtype: str | None, device: torch.device) -> NativeModel:
    """The native model of a Hugging Face folder or hub id; ``dtype`` None: that of its config, or of its files.

    Raises:
        BadInputError: if the spec does not read its type or a feature of it, or a weight is missing or does not fit.
        PluginError: if the code of the spec fails.
    """
    config = _read_config(path)
    if config.model_type not in spec.supported_model_types:
        known = ", ".join(sorted(spec.supported_model_types))
        raise BadInputError(
            f"{path}: is of model type {config.model_type!r}; the model spec {spec.name!r} reads {known}"
        )
    with _blamed(path, spec, f"{spec.model_args_class.__name__}.from_hf_config"):
        args = spec.model_args_class.from_hf_config(config)
    folder = _local_folder(path)
    tensors = read_safetensors(folder)
    with (
        _blamed(path, spec, spec.model_class.__name__),
        _own_random_numbers(device),
        _default_dtype(_choose_dtype(dtype, config, tensors)),
        torch.device(device),
    ):
        model = spec.model_class(args)
    with _blamed(path, spec, f"{spec.model_class.__name__}.init_buffers"):
        model.init_buffers(device)
    try:
        generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:
        ends = (getattr(part, "eos_token_id", None) for part in (config, text_config(config)))
        generation_config = GenerationConfig(eos_token_id=next((end for end in ends if end is not None), None))
    with _blamed(path, spec, spec.state_dict_adapter_class.__name__):
        native = NativeModel(model, spec.state_dict_adapter_class(args, config), config, generation_config)
        weights = NativeWeights(native)
        weights.skip_unused(tensors)
    weights.apply(weights.table.plan(tensors, str(path)))
    return native


@contextmanager
def _blamed(path: str, spec: ModelSpec, what: str) -> Iterator[None]:
    """Say of an error of a plugin's code which model it is about, and whose code it is."""
    try:
        yield
    except BadInputError as error:
        kind = PluginError if isinstance(error, PluginError) else BadInputError
        raise kind(f"{path}: {error}") from error
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, PretrainedConfig):
            raise BadInputError(
                f"{path}: config.json has no {error.name!r}, which {what} of the model spec {spec.name!r} reads"
            ) from error
        raise PluginError(f"{path}: {what} of the model spec {spec.name!r} failed: {describe(error)}") from error


class _PlainConfig(PretrainedConfig):
    """Of a type that transformers does not know: what config.json says.

    As in the types that it knows, ``rope_theta`` and ``rope_scaling`` of older files become ``rope_parameters``.
    """

    rope_parameters: dict[str, Any] | None = None


def _read_config(path: str) -> Any:
    try:
        plain, _ = PretrainedConfig.get_config_dict(path)
        if plain.get("model_type") in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(path)
        config = _plain_config(plain)
        if isinstance(plain.get("text_config"), dict):
            config.text_config = _plain_config(plain["text_config"])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path}: its config.json cannot be read: {error}") from error
    return config


def _plain_config(plain: dict[str, Any]) -> Any:
    config = _PlainConfig.from_dict(dict(plain))
    config.model_type = plain.get("model_type", "")
    if "rope_theta" in plain:
        config.rope_theta = plain["rope_theta"]
    return config


def text_config(config: Any) -> Any:
    """The part of a config that is about the language model; itself, if it has no parts."""
    nested = getattr(config, "text_config", None)
    return nested if isinstance(nested, PretrainedConfig) else config


def _local_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        # Not the copies of the weights in other layouts, which lie in subfolders or have other names.
        return Path(snapshot_download(path, allow_patterns=["model*.safetensors*", "*.json"]))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: its files cannot be downloaded: {error}") from error


def _choose_dtype(dtype: str | None, config: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.dtype:
    if dtype is not None:
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    named = getattr(config, "dtype", None)
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


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Layers are made with random weights; the trainer's random numbers, in the same process, must not depend on it."""
    devices = [] if device.type != "cuda" else [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(devices=devices):
        yield


# ------------------------------------------------------------------------------------------------------------ weights


class NativeWeights:
    """The weights of a native model, under the names and in the layout of Hugging Face.

    New ones are always copied, since the model may lay them out in another way.

    Raises:
        PluginError: if the adapter gives one Hugging Face name to parameters of different shapes.
    """

    borrowed = 0

    def __init__(self, native: NativeModel) -> None:
        self.native = native
        names: list[list[str]] = []
        shapes: list[list[int]] = []
        required: list[bool] = []
        self.dtypes: list[torch.dtype] = []
        index: dict[str, int] = {}
        adapter = native.adapter
        for aliases, tensor in self._own().values():
            shadow = torch.empty_like(tensor, device="meta")
            # A tied tensor has the names of each of its ends, in whatever order the model lists them.
            converted = [adapter.convert_single_to_hf(alias, shadow) or [] for alias in aliases]
            pieces = max(converted, key=len)
            for position, (name, piece) in enumerate(pieces):
                given = [hf[position][0] for hf in converted if len(hf) == len(pieces)]
                found = index.get(name, len(names))
                if found == len(names):
                    names.append([])
                    shapes.append(list(piece.shape))
                    required.append(False)
                    self.dtypes.append(piece.dtype)
                # Two parameters of one name are ends of a tie that the model leaves to the adapter.
                if shapes[found] != list(piece.shape):
                    raise PluginError(
                        f"{type(adapter).__name__}.convert_single_to_hf gives the name {name!r} to parameters of the "
                        f"shapes {shapes[found]} and {list(piece.shape)}. What the checkpoint holds as one tensor must "
                        "be one parameter of the model."
                    )
                names[found] += [alias for alias in given if alias not in names[found]]
                required[found] |= isinstance(tensor, nn.Parameter)
                index.update(dict.fromkeys(given, found))
        self.table = WeightTable(names, shapes, required, ignored=native.unused, advice=_ADVICE)

    def _own(self) -> dict[int, tuple[list[str], torch.Tensor]]:
        """Each tensor of the model that is saved, with all its names."""
        found: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in self.native.model.state_dict(keep_vars=True).items():
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
        return found

    def skip_unused(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Ignore, from now on, names of a checkpoint of which the adapter makes nothing (say, ``inv_freq``)."""
        known = {name: tensor.to("meta") for name, tensor in tensors if self.table.knows(name)}
        unknown = {name: tensor.to("meta") for name, tensor in tensors if name not in known}
        made = self._made_of(known) if unknown else None
        if made is None:
            return
        unused = list(unknown)
        if self._made_of(known | unknown) != made:
            # The checkpoint does not fit; the table is to name what is wrong.
            unused = [name for name in unknown if self._made_of(known | {name: unknown[name]}) == made]
        self.native.unused.extend(f"^{re.escape(name)}$" for name in unused)

    def _made_of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size] | None:
        """Names and shapes that the adapter makes; None if it raises."""
        try:
            made = self.native.adapter.from_hf(tensors)
            return {name: tensor.shape for name, tensor in made.items() if tensor is not None}
        except Exception:  # it does not know a name, or misses one: the table says which
            return None

    def apply(self, planned: Mapping[int, torch.Tensor]) -> None:
        """Copy tensors that ``table.plan`` has matched. No token may be computed meanwhile.

        Raises:
            PluginError: if the adapter does not make every parameter of them, or another shape. Nothing is written.
        """
        adapter = self.native.adapter
        named = {self.table.names[index][0]: tensor for index, tensor in planned.items()}
        try:
            given = adapter.from_hf(named)
        except Exception as error:
            raise PluginError(f"{type(adapter).__name__}.from_hf failed: {describe(error)}") from error
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for aliases, own in self._own().values():
            new = next((given[alias] for alias in aliases if given.get(alias) is not None), None)
            if new is None:
                if isinstance(own, nn.Parameter):
                    raise PluginError(f"{type(adapter).__name__}.from_hf does not make the parameter {aliases[0]!r}")
                continue
            if new.shape != own.shape:
                raise PluginError(
                    f"{type(adapter).__name__}.from_hf makes {aliases[0]!r} of shape {list(new.shape)}, but the "
                    f"model's has {list(own.shape)}"
                )
            copies.append((own, new))
        with torch.no_grad():
            for own, new in copies:
                own.copy_(new)
