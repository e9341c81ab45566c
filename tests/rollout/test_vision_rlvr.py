"""`vision_rlvr`: where images may stand in a row, what is trained on, and what the reward sees."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rollout_fakes import FakeEngine

from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.data.packing import pack_trajectories
from areal_core.data.processor import load_processor
from areal_core.errors import BadInputError
from areal_core.rollout.context import EpisodeEngine
from areal_core.rollout.workflows.vision_rlvr import VisionRLVRWorkflow, open_image, read_row

IMAGE, END = 9, 2
GCONFIG = GenerationHyperparameters(n_samples=2, max_new_tokens=4)


class FakeTokenizer:
    """One token for a character; `#` stands for an image."""

    chat_template, eos_token_id, pad_token_id = "any", END, 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [IMAGE if char == "#" else ord(char) for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in (IMAGE, END))]
        return "".join("#" if i == IMAGE else chr(i) for i in kept)


class FakeProcessor:
    """Each image of H x W pixels has H * W features and as many placeholders."""

    chat_template = "any"

    def __init__(self) -> None:
        self.calls = 0

    def apply_chat_template(self, messages: list[Any], tokenize: bool, **options: Any) -> Any:
        assert options["add_generation_prompt"]
        text, ids, pixels = "", [], []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "image":
                    image = np.asarray(part["image"])
                    text += "#"
                    ids += [IMAGE] * (image.shape[0] * image.shape[1])
                    pixels.append(torch.tensor(image.reshape(-1, 3).astype(np.float32)))
                else:
                    text += part["text"]
                    ids += [ord(char) for char in part["text"]]
        if not tokenize:
            return text
        self.calls += 1
        made = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        made["mm_token_type_ids"] = (made["input_ids"] == IMAGE).long()
        return {**made, "pixel_values": torch.cat(pixels)} if pixels else made


class Reward:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def __call__(self, *arguments: Any, **columns: Any) -> float:
        self.calls.append((arguments, columns))
        return 1.0


def picture(value: int = 0, height: int = 2, width: int = 3) -> Any:
    return np.full((height, width, 3), value, np.uint8)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


ASK = {"type": "text", "text": "ab"}


async def test_episode_when_prompt_has_an_image_expected_placeholders_untrained_and_tensors_shared() -> None:
    row = {"messages": [user({"type": "image", "image": picture()}, ASK)], "answer": "x", "images": None, "_uid": "0"}
    engine, reward, processor = FakeEngine(lambda request: [ord("c"), IMAGE, END]), Reward(), FakeProcessor()
    workflow = VisionRLVRWorkflow(GCONFIG, FakeTokenizer(), processor, reward)
    cache: dict[Any, Any] = {}

    one, two = [
        await workflow.arun_episode(EpisodeEngine(engine, sample=sample, group_cache=cache), row) for sample in range(2)
    ]

    assert one.input_ids.tolist() == [IMAGE] * 6 + [ord("a"), ord("b"), ord("c"), IMAGE, END]
    assert one.loss_mask.tolist() == [False] * 8 + [True] * 3
    assert one.multi_modal_input.keys() == {"pixel_values"}
    assert one.multi_modal_input is two.multi_modal_input
    assert one.metadata == {"prompt": "#ab", "completion": "c"}
    assert processor.calls == 1
    request = engine.requests[0]
    assert request.processor is processor and len(request.image_data) == 1
    assert request.image_data[0] is engine.requests[1].image_data[0]
    ((prompt, completion, prompt_ids, completion_ids), columns) = reward.calls[0]
    assert (prompt, completion, len(prompt_ids), completion_ids) == ("ab", "c", 8, [ord("c"), IMAGE, END])
    assert columns == {"answer": "x", "messages": [user({"type": "image"}, ASK)]}
    batch = pack_trajectories([one, two])
    assert batch.multi_modal_input is not None and batch.multi_modal_input[0] is batch.multi_modal_input[1]


async def test_episode_when_row_has_no_image_expected_plain_request() -> None:
    engine = FakeEngine(lambda request: [ord("c"), END])
    workflow = VisionRLVRWorkflow(GCONFIG, FakeTokenizer(), FakeProcessor(), Reward())

    trajectory = await workflow.arun_episode(EpisodeEngine(engine), {"messages": [{"role": "user", "content": "ab"}]})

    assert engine.requests[0].image_data is None and engine.requests[0].processor is None
    assert not trajectory.multi_modal_input


def encoded(value: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(value)).save(stream, kind)
    return stream.getvalue()


def test_open_image_when_given_in_any_way_expected_the_same_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(7))
    url = "data:image/png;base64," + base64.b64encode(encoded(7)).decode()
    ways = [Image.fromarray(picture(7)), picture(7), encoded(7), str(tmp_path / "a.png"), tmp_path / "a.png", url]
    ways += [{"bytes": encoded(7), "path": None}, {"url": f"file://{tmp_path}/a.png"}]

    for way in ways:
        opened = open_image(way, {})
        assert opened.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(opened), picture(7))


@pytest.mark.parametrize("bad", ["http://example.com/a.png", b"no image", 3, "data:image/png;base64,???", "\0"])
def test_open_image_when_unusable_expected_error_naming_the_row(bad: Any) -> None:
    with pytest.raises(BadInputError, match="dataset row 0-4: an image cannot be opened"):
        open_image(bad, {"_uid": "0-4"})


def values(row: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """The kinds of the parts of each message, and the first number of every image."""
    messages, images = read_row(row)
    kinds = [m["content"] if isinstance(m["content"], str) else [p["type"] for p in m["content"]] for m in messages]
    return kinds, [int(np.asarray(image)[0, 0, 0]) for image in images]


def test_read_row_when_images_stand_beside_the_chat_expected_them_in_their_places() -> None:
    system = {"role": "system", "content": "s"}
    place = {"type": "image"}

    in_order = values({"messages": [system, user(place, ASK, place)], "images": [picture(1), picture(2)]})
    before_text = values({"messages": [system, {"role": "user", "content": "ab"}], "image": picture(3)})
    inside = values({"messages": [user({"type": "image_url", "image_url": {"url": data_url(4)}}, ASK)]})

    assert in_order == (["s", ["image", "text", "image"]], [1, 2])
    assert before_text == (["s", ["image", "text"]], [3])
    assert inside == ([["image", "text"]], [4])


def data_url(value: int) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(value)).decode()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [user({"type": "image"}, ASK)]}, "has 1 places for images in 'messages', 0 images there, and 0"),
        (
            {"messages": [user({"type": "image", "image": picture()})], "images": [picture()]},
            "has 1 places for images in 'messages', 1 images there, and 1 in the column 'images'",
        ),
        ({"messages": [{"role": "system", "content": "a"}], "images": [picture()]}, "no message of the role 'user'"),
        ({"images": [picture()]}, "has no column 'messages'"),
    ],
)
def test_read_row_when_images_have_no_place_expected_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read_row(row)


def test_read_row_when_called_expected_row_untouched() -> None:
    part = {"type": "image"}
    row = {"messages": [user(part, ASK)], "images": [picture()]}

    read_row(row)

    assert part == {"type": "image"} and row["messages"] == [user(part, ASK)]


async def test_episode_when_prompt_leaves_no_room_expected_error() -> None:
    workflow = VisionRLVRWorkflow(GCONFIG.new(max_tokens=8), FakeTokenizer(), FakeProcessor(), Reward())

    with pytest.raises(BadInputError, match="has 8 tokens"):
        await workflow.arun_episode(EpisodeEngine(FakeEngine()), {"messages": [user(ASK)], "image": picture()})


def test_load_processor_when_folder_has_none_expected_error(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"actor\.path: no processor for images at"):
        load_processor(str(tmp_path), key="actor.path")
