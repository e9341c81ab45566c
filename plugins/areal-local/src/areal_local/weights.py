"""New weights for a model that is in use: everything is checked before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from areal_core.errors import BadInputError, did_you_mean

#: What the tensors that a trainer hands over are called.
FROM_TRAINER = "update_weights_from_memory"


@attrs.frozen
class WeightTable:
    """Names and shapes of a model's tensors, without the tensors.

    Attributes:
        names: for each tensor, all its names in Hugging Face layout (tied ones have several).
        shapes: of each tensor.
        required: whether an update must hold it: parameters, not buffers.
        prefix: of the base model; checkpoints of a bare base model lack it.
        ignored: patterns of names that checkpoints hold and the model has no use for.
        advice: what to add where the tensors of a trainer (``source`` is ``FROM_TRAINER``) do not fit.
    """

    names: list[list[str]]
    shapes: list[list[int]]
    required: list[bool]
    prefix: str = ""
    ignored: list[str] = attrs.field(factory=list)
    advice: str = ""
    _index: dict[str, int] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        for i, names in enumerate(self.names):
            self._index.update(dict.fromkeys(names, i))

    @classmethod
    def of(cls, model: Any) -> tuple[WeightTable, list[torch.Tensor]]:
        """The table of a transformers model, and its tensors in the same order."""
        parameters = {id(parameter) for parameter in model.parameters()}
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        table = cls(
            list(names.values()),
            [list(tensor.shape) for tensor in tensors.values()],
            [key in parameters for key in tensors],
            getattr(model, "base_model_prefix", ""),
            list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        )
        return table, list(tensors.values())

    def knows(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return name in self._index or f"{self.prefix}.{name}" in self._index

    def _advice(self, source: str) -> str:
        return self.advice if source == FROM_TRAINER else ""

    def find(self, name: str, shape: Iterable[int], source: str) -> int | None:
        """Index of the tensor ``name``; None for one that is to be ignored.

        Raises:
            BadInputError: for a name the model lacks, or another shape.
        """
        index = self._index.get(name, self._index.get(f"{self.prefix}.{name}"))
        if index is None:
            if any(re.search(pattern, name) for pattern in self.ignored):
                return None
            hint = did_you_mean(name, self._index) + self._advice(source)
            raise BadInputError(f"{source}: the model has no weight {name!r}.{hint}")
        if list(shape) != self.shapes[index]:
            found = f"{name!r} has shape {list(shape)}, but the model's has {self.shapes[index]}."
            raise BadInputError(f"{source}: {found}{self._advice(source)}")
        return index

    def check_complete(self, given: Iterable[int], source: str) -> None:
        """Raise ``BadInputError`` unless every parameter is among the indices ``given``."""
        found = set(given)
        missing = [
            names[0]
            for i, (names, required) in enumerate(zip(self.names, self.required, strict=True))
            if required and i not in found
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            hint = f" A full set of weights is needed.{self._advice(source)}"
            raise BadInputError(f"{source}: weights are missing: {shown}.{hint}")

    def plan(self, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> dict[int, torch.Tensor]:
        """Match named tensors with the model's own.

        Args:
            tensors: (name in Hugging Face layout, full tensor). Every parameter must be covered; tied ones by any of
                their names. Buffers that the model saves may be given.
            source: what the error messages call the tensors.

        Returns:
            The new tensor of each index that is given.

        Raises:
            BadInputError: for a name the model lacks, a parameter that is missing, or another shape.
        """
        planned: dict[int, torch.Tensor] = {}
        for name, tensor in tensors:
            index = self.find(name, tensor.shape, source)
            if index is not None:
                planned[index] = tensor
        self.check_complete(planned, source)
        return planned

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible; ``WeightTable(**plain)`` makes it again."""
        return {field: getattr(self, field) for field in ("names", "shapes", "required", "prefix", "ignored", "advice")}


class ModelWeights:
    """The tensors of a model that generates.

    Args:
        model: a transformers model.
        may_borrow: whether ``apply`` may make the model read new tensors where they are instead of copying them. Only
            right where nobody writes into them while tokens are computed, and the model belongs to the engine.
    """

    def __init__(self, model: Any, *, may_borrow: bool) -> None:
        self.table, self.tensors = WeightTable.of(model)
        self.may_borrow = may_borrow
        self._borrowed: dict[int, int] = {}
        """Index of a tensor that somebody else owns -> its address."""

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [tensor.dtype for tensor in self.tensors]

    @property
    def borrowed(self) -> int:
        """How many tensors are somebody else's, read in place."""
        return sum(self._is_borrowed(i) for i in self._borrowed)

    def apply(self, planned: Mapping[int, torch.Tensor]) -> None:
        """Borrow or copy, with a cast where the types differ. No token may be computed meanwhile."""
        with torch.no_grad():
            for index, new in planned.items():
                own = self.tensors[index]
                if _is_same_memory(own, new):
                    continue
                if self.may_borrow and _can_stand_for(new, own):
                    own.data = new.detach()
                    self._borrowed[index] = own.data_ptr()
                    continue
                if self._is_borrowed(index):
                    # Its owner's memory is not ours to write.
                    own.data = torch.empty_like(own)
                own.copy_(new)

    def _is_borrowed(self, index: int) -> bool:
        # Moving the model to another device and back gives it memory of its own again.
        return self._borrowed.get(index) == self.tensors[index].data_ptr()


def _is_same_memory(own: torch.Tensor, new: torch.Tensor) -> bool:
    return own.data_ptr() == new.data_ptr() and own.dtype == new.dtype and own.stride() == new.stride()


def _can_stand_for(new: torch.Tensor, own: torch.Tensor) -> bool:
    return (
        type(new) in (torch.Tensor, torch.nn.Parameter)
        and new.dtype == own.dtype
        and new.device == own.device
        and new.layout == own.layout == torch.strided
        and new.is_contiguous()
        and own.is_contiguous()
        # Not one that a decoder has joined with others.
        and own.untyped_storage().nbytes() == own.nbytes
        and not new.is_inference()
    )


def read_safetensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a Hugging Face folder: ``model.safetensors``, or the files of its index.

    Raises:
        BadInputError: if a file is missing or broken.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInputError(f"{index}: not a safetensors index: {error}") from error
    else:
        files = ["model.safetensors"]
    tensors: list[tuple[str, torch.Tensor]] = []
    for file in files:
        path = folder / file
        if not path.is_file():
            raise BadInputError(f"{path}: no such file. Expected safetensors in Hugging Face layout.")
        try:
            with safe_open(str(path), framework="pt") as handle:
                tensors += [(name, handle.get_tensor(name)) for name in handle.keys()]  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{path}: not a readable safetensors file: {error}") from error
    return tensors
