"""Where the weights of a model come from on rank 0: files, one tensor at a time, or a model that is given away."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from areal_core.errors import BadInputError
from areal_fsdp.loading import check_unexpected, check_weight_files


class WeightSource(Protocol):
    """Gives each weight of a model once."""

    def take(self, name: str) -> torch.Tensor:
        """The whole tensor of that name in the model, on the CPU."""


class ModelSource:
    """The weights of a whole model on the CPU, each of them freed when it is taken."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = dict(named_weights(model))
        # The modules must not keep alive what was taken.
        for module in model.modules():
            module._parameters.clear()
            module._buffers.clear()

    def take(self, name: str) -> torch.Tensor:
        return self.tensors.pop(name)


class FileSource:
    """The safetensors of a Hugging Face folder. Everything is checked at first, from the headers alone.

    Args:
        model: the model to fill; it may be on the meta device.

    Raises:
        BadInputError: if a file is missing or damaged, or a tensor is missing, unexpected, or of another shape.
        NeedsWholeModel: if only a whole model, as transformers loads it, has all tensors.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        check_weight_files(folder)
        self.places: dict[str, tuple[Path, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        rename = _renaming(model)
        unexpected: list[str] = []
        expected = dict(named_weights(model, tied_once=False))
        for file in sorted(folder.glob("model*.safetensors")):
            with _opened(file) as handle:
                for key in handle.keys():  # noqa: SIM118 - a file, not a mapping
                    name = rename(key)
                    if name not in expected:
                        unexpected.append(key)
                        continue
                    self.places[name] = (file, key)
                    shapes[name] = tuple(handle.get_slice(key).get_shape())
        self._share_ties(model)
        self._check(model, folder, expected, shapes, unexpected)

    def take(self, name: str) -> torch.Tensor:
        file, key = self.places[name]
        # Opened for this tensor alone: closing the file gives the memory that maps it back.
        with _opened(file) as handle:
            return handle.get_tensor(key)

    def _share_ties(self, model: nn.Module) -> None:
        """A tied tensor lies in the files under one of its names."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for tied in names.values():
            found = next((self.places[name] for name in tied if name in self.places), None)
            if found is not None:
                for name in tied:
                    self.places.setdefault(name, found)

    def _check(
        self,
        model: Any,
        folder: Path,
        expected: dict[str, torch.Tensor],
        shapes: dict[str, tuple[int, ...]],
        unexpected: list[str],
    ) -> None:
        missing = sorted(expected.keys() - self.places.keys())
        if missing and all(name.startswith("score.") for name in missing):
            raise NeedsWholeModel("the scalar head starts random")
        if missing:
            raise BadInputError(
                f"{folder}: {len(missing)} tensors are missing from the safetensors, the first is {missing[0]!r}. "
                "The weights do not belong to this config.json."
            )
        for name, shape in shapes.items():
            if shape != tuple(expected[name].shape):
                raise BadInputError(
                    f"{self.places[name][0]}: tensor {self.places[name][1]!r} has shape {shape}, but config.json asks "
                    f"for {tuple(expected[name].shape)}."
                )
        check_unexpected(model, folder, unexpected)


class NeedsWholeModel(Exception):
    """Some tensors are in no file as they are: a new head, or those that transformers makes out of several ones."""


def named_weights(model: nn.Module, *, tied_once: bool = True) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, tied parameters once."""
    persistent = model.state_dict(keep_vars=True)
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=tied_once))
    return [*named, *((name, value) for name, value in model.named_buffers() if name in persistent)]


def _renaming(model: Any) -> Any:
    """``name in the files -> name in the model``, as transformers maps them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()

    def rename(key: str) -> str:
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if converter is not None:
            raise NeedsWholeModel(name)
        return str(name)

    return rename


class _opened:
    """``safe_open`` with an error that names the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Any:
        try:
            self.handle: Any = safe_open(self.file, framework="pt")
            return self.handle.__enter__()
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{self.file}: not a valid safetensors file ({error}). Copy the file again.") from error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.handle.__exit__(kind, error, trace)
        if isinstance(error, (SafetensorError, OSError)):
            raise BadInputError(f"{self.file}: cannot be read ({error}). Copy the file again.") from error
