"""Reinforcement learning with a verifiable reward on prompts with images."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from areal_core.api.engine_api import InferenceEngine
from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest, Trajectory
from areal_core.api.reward_api import awaitable_reward
from areal_core.api.workflow_api import RolloutWorkflow
from areal_core.errors import BadInputError
from areal_core.rollout.workflows.chat import (
    Message,
    check_length,
    check_tokenizer,
    messages_of,
    reward_columns,
    template_errors,
)

#: Types of a message's part that is an image, and where it stands in it.
_PARTS, _SOURCES = ("image", "image_url"), ("image", "image_url", "path", "url")
#: Columns of a row that hold its images.
_COLUMNS = ("images", "image")


@attrs.frozen(eq=False)
class _Prompt:
    """Made once for the samples of a prompt.

    Attributes:
        ids: with as many placeholders as the model has features.
        text, whole: without and with special tokens; each image is one placeholder.
        images: as they came from the row, opened.
        tensors: by the model's own names.
        columns: what the reward gets of the row.
    """

    ids: list[int]
    text: str
    whole: str
    images: list[Any]
    tensors: Mapping[str, Any]
    columns: dict[str, Any]


class VisionRLVRWorkflow(RolloutWorkflow):
    """Asks once about an image (or several, or none) and scores the answer.

    A row has ``messages``. Its images stand in them, as parts of a message's content
    (``{"type": "image", "image": ...}``), or beside them, in the column ``images`` (or ``image``): in the order of the
    parts ``{"type": "image"}``, or, where ``messages`` is text alone, before the text of the first user message. An
    image is a PIL image, an array ``[height, width, 3]`` of bytes, the bytes of a file, a ``data:`` URL, or the path of
    a file; nothing is fetched from a network.

    The reward gets the columns of the row without its images. The trajectory carries the tensors that the processor
    makes of the images; the samples of a prompt share them.

    Args:
        gconfig: sampling; the tokenizer's EOS and pad ids end a completion beside its own stop ids.
        tokenizer: of the model; with a chat template, if the processor has none.
        processor: the model's transformers processor.
        reward_fn: ``await reward_fn(prompt, completion, prompt_ids, completion_ids, **columns) -> float``, or a plain
            function of these, which is then wrapped (``AsyncRewardWrapper``).

    Raises:
        BadInputError: no chat template, no ``messages``, an image that cannot be opened or has no place in them, or a
            prompt that leaves no room for an answer.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any,
        reward_fn: Callable[..., Awaitable[float] | float],
    ) -> None:
        if not getattr(processor, "chat_template", None):
            check_tokenizer(tokenizer, "vision_rlvr")
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer, self.processor = tokenizer, processor
        self.reward_fn = awaitable_reward(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        cache: dict[Any, Any] = getattr(engine, "group_cache", {})
        if "prompt" not in cache:
            cache["prompt"] = self._prompt(data)
        prompt: _Prompt = cache["prompt"]
        request = ModelRequest(input_ids=prompt.ids, gconfig=self.gconfig, rid="", tokenizer=self.tokenizer)
        if prompt.images:
            request.image_data, request.processor = prompt.images, self.processor
        response = await engine.agenerate(request)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        reward = await self.reward_fn(prompt.text, completion, prompt.ids, response.output_tokens, **prompt.columns)
        return Trajectory.from_response(
            response,
            reward,
            metadata={"prompt": prompt.whole, "completion": completion},
            multi_modal_input=prompt.tensors,
        )

    def _prompt(self, row: dict[str, Any]) -> _Prompt:
        messages, images = read_row(row)
        render = functools.partial(
            self.processor.apply_chat_template, messages, add_generation_prompt=True, **self._template()
        )
        with template_errors(row):
            text = render(tokenize=False)
            inputs = dict(render(tokenize=True, return_dict=True, return_tensors="pt"))
        ids = inputs.pop("input_ids")[0].tolist()
        check_length(ids, self.gconfig.max_tokens, row)
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        return _Prompt(
            ids=ids,
            text=self.tokenizer.decode(plain, skip_special_tokens=True),
            whole=text,
            images=images,
            tensors={name: value for name, value in inputs.items() if name not in _TEXT_INPUTS},
            columns={
                **{name: value for name, value in reward_columns(row).items() if name not in _COLUMNS},
                "messages": [_shown(message) for message in messages],
            },
        )

    def _template(self) -> dict[str, Any]:
        # The processor of a model whose template lies with the tokenizer looks for it nowhere else.
        if getattr(self.processor, "chat_template", None):
            return {}
        return {"chat_template": self.tokenizer.get_chat_template()}


_TEXT_INPUTS = frozenset({"attention_mask", "mm_token_type_ids", "token_type_ids"})


def read_row(row: Mapping[str, Any]) -> tuple[list[Message], list[Any]]:
    """The chat of a row with every image opened and in its place (``{"type": "image", "image": ...}``), and the images.

    Raises:
        BadInputError: naming the row, if an image cannot be opened, or images and places differ in number.
    """
    beside: Any = next((row[name] for name in _COLUMNS if row.get(name) is not None), [])
    if not isinstance(beside, (list, tuple)):
        beside = [beside]
    messages: list[Message] = []
    places: list[Message] = []
    inside: list[Any] = []
    for message in messages_of(row):
        message = dict(message)
        messages.append(message)
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            continue
        message["content"] = [dict(part) for part in content]
        for part in message["content"]:
            if part.get("type") in _PARTS:
                inside += [part[name] for name in _SOURCES if part.get(name) is not None][:1]
                places.append(part)
    given = [*inside, *beside]
    if not places and given:
        places = _add_places(messages, len(given), row)
    if len(given) != len(places) or (inside and beside):
        raise BadInputError(
            f"{_name(row)} has {len(places)} places for images in 'messages', {len(inside)} images there, and "
            f"{len(beside)} in the column 'images'. Give each place its image in one of both ways."
        )
    images = [open_image(image, row) for image in given]
    for place, image in zip(places, images, strict=True):
        place.clear()
        place |= {"type": "image", "image": image}
    return messages, images


def _shown(message: Message) -> Message:
    """A message without its images, only their places."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    return {**message, "content": [{"type": "image"} if part.get("type") == "image" else part for part in content]}


def _add_places(messages: list[Message], count: int, row: Mapping[str, Any]) -> list[Message]:
    for message in messages:
        if message["role"] == "user":
            content = message.get("content")
            text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
            places: list[Message] = [{"type": "image"} for _ in range(count)]
            message["content"] = [*places, *text]
            return places
    raise BadInputError(f"{_name(row)} has {count} images, but no message of the role 'user' to show them in.")


def open_image(image: Any, row: Mapping[str, Any]) -> Any:
    """A PIL image in RGB.

    Raises:
        BadInputError: naming the row.
    """
    import numpy as np
    from PIL import Image

    try:
        if isinstance(image, Mapping):  # an image column of the `datasets` package that was not decoded
            image = image.get("bytes") or image.get("path") or image.get("url")
        if isinstance(image, str) and image.startswith("data:"):
            image = base64.b64decode(image.partition(",")[2], validate=True)
        if isinstance(image, (bytes, bytearray)):
            image = Image.open(io.BytesIO(image))
        elif isinstance(image, (str, Path)):
            image = Image.open(str(image).removeprefix("file://"))
        elif isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise TypeError(f"a {type(image).__name__} is no image")
        return image.convert("RGB")
    except (OSError, TypeError, ValueError) as error:
        raise BadInputError(
            f"{_name(row)}: an image cannot be opened ({str(error)[:200]}). Give a PIL image, an array "
            "[height, width, 3] of bytes, the bytes of a file, a data: URL, or the path of a file."
        ) from error


def _name(row: Mapping[str, Any]) -> str:
    return f"dataset row {row.get('_uid', '?')}"
