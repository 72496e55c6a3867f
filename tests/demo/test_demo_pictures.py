"""The pictures that the bundled model is trained and examined on, and what it says of one."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image

from quire.demo import model_path, picture_path

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

import eyes  # noqa: E402
import joint  # noqa: E402
import picture_chats  # noqa: E402
import pictures  # noqa: E402
import reading  # noqa: E402
import world  # noqa: E402

pytestmark = pytest.mark.slow


def made(seed: int, count: int) -> list[pictures.Picture]:
    rng = Random(seed)
    return [pictures.make_picture(rng) for _ in range(count)]


def test_the_same_seed_draws_the_same_pictures() -> None:
    first, second = made(3, 20), made(3, 20)
    assert [p.placed for p in first] == [p.placed for p in second]
    assert all(a.image.tobytes() == b.image.tobytes() for a, b in zip(first, second, strict=True))
    assert len({p.image.tobytes() for p in first}) == 20


def test_shapes_are_whole_apart_and_told_from_left_to_right() -> None:
    for picture in made(4, 300):
        width, height = picture.image.size
        assert 1 <= len(picture.placed) <= world.MAX_SHAPES
        assert [one.x for one in picture.placed] == sorted(one.x for one in picture.placed)
        for number, one in enumerate(picture.placed):
            assert one.radius <= one.x <= width - one.radius and one.radius <= one.y <= height - one.radius
            for other in picture.placed[:number]:
                assert math.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius


def test_a_shape_s_middle_has_its_colour_and_the_corners_are_light() -> None:
    for picture in made(5, 300):
        for one in picture.placed:
            pixel = picture.image.getpixel((int(one.x), int(one.y)))
            assert max(abs(a - b) for a, b in zip(pixel, world.COLORS[one.shape.color], strict=True)) <= 14
        light = [picture.image.getpixel(corner) for corner in ((0, 0), (picture.image.width - 1, 0))]
        assert all(min(pixel) > 150 for pixel in light)


def test_every_kind_and_colour_is_drawn() -> None:
    shapes = {str(one.shape) for picture in made(6, 400) for one in picture.placed}
    assert shapes == {f"{color} {kind}" for color in world.COLORS for kind in world.KINDS}


def test_training_never_shows_a_scene_or_asks_a_question_that_is_held_out() -> None:
    rng = Random(7)
    for _ in range(300):
        picture, chat = picture_chats.picture_chat(rng)
        assert not world.is_held_out(picture.scene)
        assert chat[-1]["role"] == "assistant"
        assert sum(message["content"].count(picture_chats.IMAGE) for message in chat) == 1
    assert any(world.is_held_out(item.picture.scene) for item in picture_chats.picture_exam(Random(8), 300))


def test_exam_answers_follow_from_the_picture() -> None:
    for item in picture_chats.picture_exam(Random(9), 210):
        shapes, question = item.picture.scene.shapes, item.question
        if question.kind == "color":
            assert [s.color for s in shapes if s.kind in question.text] == [question.answer]
        elif question.kind == "shape":
            assert [s.kind for s in shapes if s.color in question.text] == [question.answer]
        elif question.kind == "count":
            assert question.answer == world.NUMBERS[len(shapes)]
        elif question.kind == "describe":
            assert all(str(shape) in question.answer for shape in shapes)


def test_patches_are_told_what_is_on_them() -> None:
    shape = world.Shape("star", "green")
    image = Image.new("RGB", (96, 96), "white")
    picture = pictures.Picture(image, (pictures.Placed(shape, 30.0, 66.0, 20.0),))
    truth = eyes._truth(picture, eyes.VisionConfig()).reshape(8, 8, 4)
    assert truth[5, 2].tolist() == [4, 2, 1, 1]  # a star, green, the first of one
    assert truth[0, 7].tolist() == [0, 0, 0, 1]
    assert (truth[..., 0] > 0).sum() == (truth[..., 1] > 0).sum() < 64


def test_training_sees_the_pixels_that_the_image_processor_makes() -> None:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model_path(), backend="pil")
    for picture in made(10, 10):
        ours = eyes.pixels(picture.image, eyes.VisionConfig())
        theirs = processor(picture.image, return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_training_example_has_a_placeholder_for_every_patch() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    assert tokenizer.chat_template == reading.CHAT_TEMPLATE
    settings = joint.Joint(), reading.Reading(), eyes.VisionConfig()
    model = joint.join(reading.build_model(settings[1], tokenizer), eyes.build_tower(settings[2]), tokenizer, 1)
    stage = joint.lessons(*settings, model, tokenizer)
    batches = stage.batches(0)
    shown = [batch for batch in batches if isinstance(batch, joint.Shown)]
    marker = tokenizer.convert_tokens_to_ids(picture_chats.IMAGE)
    for batch in shown:
        assert ((batch.text.ids == marker).sum(1) == settings[2].tokens).all()
        assert (batch.text.weights[batch.text.ids == marker] == 0).all()
        assert torch.isfinite(stage.loss(batch))
    assert sum(len(batch.values) for batch in shown) == settings[0].pictures


@pytest.mark.parametrize("backend", ["quire", "transformers"])
def test_the_model_sees(backend: str) -> None:
    """Far more right answers on fresh pictures than guessing gives (1 in 8, 4 and 3)."""
    import evaluate_demo

    items = evaluate_demo.picture_items(5, 42)
    answerer = {"quire": evaluate_demo._quire, "transformers": evaluate_demo._transformers}[backend](model_path())
    answers = answerer(items)
    asked = [
        (item, answer) for item, answer in zip(items, answers, strict=True) if item.groups[0] in ("color", "shape")
    ]
    assert sum(answer.strip() == item.expected for item, answer in asked) >= 0.8 * len(asked)


def test_the_picture_that_ships_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from quire.cli.app import app

    assert Image.open(picture_path()).size[0] > 96
    result = CliRunner().invoke(app, ["run", "--image", str(picture_path()), "What do you see?"])
    assert result.exit_code == 0, result.output
    for shape in pictures.DEMO_SCENE.shapes:
        assert str(shape) in result.output
