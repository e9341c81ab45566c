"""Vision-language models: requests with images, and the decoder that reads them."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from areal_core.api.io_struct import ModelRequest
from areal_core.api.vision import placeholders_as_text, rope_positions, vision_token_types
from areal_core.errors import BadInputError
from areal_local.decoder import RowwiseDecoder

Images = Mapping[str, torch.Tensor]

#: Requests whose images stay prepared: the samples of a prompt come one after another.
_KEPT = 64


class ImageReader:
    """Turns ``image_data`` of requests into tensors, once for all requests that bring the same objects."""

    def __init__(self) -> None:
        # The images themselves are kept, so that no other object gets their ids meanwhile.
        self._known: OrderedDict[tuple[int, ...], tuple[Any, Images]] = OrderedDict()

    def read(self, request: ModelRequest, model: Any) -> Images:
        """Tensors by the model's own names.

        Raises:
            BadInputError: if the request has no processor, or that cannot read the images, or they do not fit the
                prompt.
        """
        if request.processor is None:
            raise BadInputError("image_data needs request.processor, the model's transformers processor")
        assert request.image_data is not None
        key = (id(request.processor), *map(id, request.image_data))
        if key not in self._known:
            self._known[key] = ((request.processor, list(request.image_data)), self._prepare(request, model))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        images = self._known[key][1]
        vision_token_types(model.config, torch.tensor(request.input_ids), images)  # enough placeholders
        return images

    def _prepare(self, request: ModelRequest, model: Any) -> Images:
        try:
            made = request.processor.image_processor(images=list(request.image_data or ()), return_tensors="pt")
        except Exception as error:
            raise BadInputError(
                f"image_data: {type(request.processor).__name__} cannot read it ({type(error).__name__}: {error})"
            ) from error
        known = inspect.signature(model.forward).parameters
        return {name: value for name, value in made.items() if name in known and isinstance(value, torch.Tensor)}


class VisionDecoder(RowwiseDecoder):
    """One sequence at a time, with its images."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device)
        self.parameters = inspect.signature(model.forward).parameters
        self.deltas: dict[int, int | None] = {}
        """Of each row: what is added to the index of a token to get its position; None: the model counts itself."""

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        capacity: int,
        images: Sequence[Images] = (),
    ) -> torch.Tensor:
        logits = []
        for index, (tokens, targets) in enumerate(zip(sequences, rows, strict=True)):
            given = {name: value.to(self.device) for name, value in (images[index] if images else {}).items()}
            last, cache, delta = self._read(torch.tensor(tokens, device=self.device), given)
            logits.append(last)
            for row in targets:
                self.deltas[row] = delta
                self.caches[row] = cache if row == targets[0] else copy.deepcopy(cache)
        return torch.stack(logits)

    def _read(self, tokens: torch.Tensor, images: Images) -> tuple[torch.Tensor, Any, int | None]:
        types = vision_token_types(self.model.config, tokens, images)
        found = rope_positions(self.model, tokens, types, images)
        keywords: dict[str, Any] = {name: types[None] for name in _TYPE_NAMES if name in self.parameters}
        delta = None
        if found is not None:
            # Not the model's own, which it keeps from one call to the next, of whatever sequence.
            keywords, delta = {"position_ids": found[0][:, None]}, found[1]
        with placeholders_as_text(self.model, tokens[None], types[None]) as input_ids:
            output = self.model(input_ids=input_ids, use_cache=True, **images, **keywords, **self.keep)
        return output.logits[0, -1], getattr(output, self.cache_name), delta

    def decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        logits = []
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            delta = self.deltas[row]
            keywords: dict[str, Any] = {}
            if delta is not None:
                keywords["position_ids"] = torch.full((3, 1, 1), position + delta, device=self.device)
            output = self.model(
                input_ids=torch.tensor([[token]], device=self.device),
                use_cache=True,
                **{self.cache_name: self.caches[row]},
                **keywords,
                **self.keep,
            )
            self.caches[row] = getattr(output, self.cache_name)
            logits.append(output.logits[0, -1])
        return torch.stack(logits)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        super().move(sources, targets, length)
        for source, target in zip(sources, targets, strict=True):
            self.deltas[target] = self.deltas.pop(source)

    def clear(self) -> None:
        super().clear()
        self.deltas.clear()


_TYPE_NAMES = ("mm_token_type_ids", "token_type_ids")
