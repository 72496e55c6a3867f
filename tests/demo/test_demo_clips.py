"""The clips that the bundled model is trained and examined on, and what it says of some that nobody has seen."""

from __future__ import annotations

import base64
import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.demo import model_path, picture_path
from tests.multimodal.clips import encoded
from tests.server.api_server import ServerProcess

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.insert(0, str(TRAINING))

import clip_chats  # noqa: E402
import clips  # noqa: E402
import styles  # noqa: E402
import world  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=40)
ASKED = "What changed?"


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A question about frames, pictures and texts, in their order."""
    kinds = {list: "video", bytes: "video", str: "text", Image.Image: "image"}
    content = [{"type": kinds[type(one)], kinds[type(one)]: one} for one in parts]
    return [{"role": "user", "content": content}]


def fresh(seed: int, count: int) -> list[clips.Clip]:
    """Clips of every kind of change in turn."""
    rng = Random(seed)
    return [clips.make_clip(rng, clips.CHANGES[number % len(clips.CHANGES)]) for number in range(count)]


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text.strip() for output in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


# --------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------


def test_the_model_tells_what_changed(llm: LLM) -> None:
    """Nearly always; by guessing it would be one clip in hundreds."""
    seen = fresh(20, 20)
    prompt = f"<|user|><|video|>{ASKED}<|end|><|assistant|>"
    requests = [{"prompt": prompt, "multi_modal_data": {"video": [list(clip.frames)]}} for clip in seen]
    said = texts(llm.generate(requests, GREEDY, use_tqdm=False))
    right = [answer == clip.change.told for answer, clip in zip(said, seen, strict=True)]
    assert sum(right) >= 17, [pair for pair in zip(said, (clip.change.told for clip in seen), strict=True)]
    assert len({clip.change.kind for clip, one in zip(seen, right, strict=True) if one}) == len(clips.CHANGES)
    # The order of the frames is seen: backwards, what has come goes.
    (clip,) = [clip for clip in seen[:5] if clip.change.kind == "disappeared"]
    (back,) = texts(llm.chat([asked(list(reversed(clip.frames)), ASKED)], GREEDY, use_tqdm=False))
    assert back.endswith(f"{clip.change.shape} appeared.")


def test_a_clip_in_company_and_in_small_steps(llm: LLM) -> None:
    """The same tokens and logprobs alone, among texts and pictures, and cut anywhere."""
    frames = [list(clip.frames) for clip in fresh(21, 3)]
    chats = [
        asked(frames[0], ASKED),
        asked("Who are you?"),
        asked(frames[1], "Describe the last frame."),
        asked(Image.open(picture_path()).convert("RGB"), "What do you see?"),
        asked(frames[2], ASKED),
    ]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    cut = LLM(max_num_batched_tokens=50, enable_prefix_caching=False)
    for engine in (llm, cut):
        for output, chat in zip(engine.chat(chats, params, use_tqdm=False), chats, strict=True):
            (alone,) = llm.chat([chat], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_transformers_says_the_same_of_the_frames_as_pictures() -> None:
    """Prompt and answer, in float32."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    llm = LLM(dtype="float32")
    processor = AutoProcessor.from_pretrained(model_path())
    model = LlavaForConditionalGeneration.from_pretrained(model_path(), dtype=torch.float32).eval()
    video, image = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("<|video|>", "<|image|>"))
    assert model.config.video_token_index == video
    for clip in fresh(22, 4):
        chat = asked(list(clip.frames), ASKED)
        (ours,) = llm.chat([chat], GREEDY, use_tqdm=False)
        text = processor.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        text = text.replace("<|video|>", "<|image|>" * len(clip.frames))
        images = [frame.convert("RGB") for frame in clip.frames]
        inputs = processor(text=text, images=images, add_special_tokens=False, return_tensors="pt")
        ids = [image if token == video else token for token in ours.prompt_token_ids or ()]
        assert ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
        assert list(ours.outputs[0].token_ids) == out


def test_of_a_file_it_is_shown_four_frames(llm: LLM) -> None:
    """The first, the last, and two between."""
    pytest.importorskip("av")
    drawn = [np.array(Image.new("RGB", (64, 48), (25 * number, 200, 90))) for number in range(10)]
    chats = [asked(encoded(np.stack(drawn))), asked([Image.fromarray(drawn[place]) for place in (0, 3, 6, 9)])]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    file, frames = llm.chat(chats, params, use_tqdm=False)
    assert file.prompt_token_ids == frames.prompt_token_ids
    assert file.outputs[0].logprobs == frames.outputs[0].logprobs


def test_by_http(llm: LLM) -> None:
    """A clip in a file, as `video_url`."""
    pytest.importorskip("av")
    (clip,) = fresh(23, 1)
    side = min(size // 2 * 2 for size in clip.frames[0].size)
    shown = np.stack([np.array(frame.resize((side, side))) for frame in clip.frames[:4]])
    url = f"data:video/x-matroska;base64,{base64.b64encode(encoded(shown)).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": ASKED}]
    with ServerProcess(OMP_NUM_THREADS="1") as server, server.client() as client:
        message = {"role": "user", "content": parts}
        answer = client.chat.completions.create(model="quire-demo", messages=[message], temperature=0)
    (expected,) = llm.chat([asked([Image.fromarray(frame) for frame in shown], ASKED)], GREEDY, use_tqdm=False)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids or ())


# --------------------------------------------------------------------------------------------
# The clips
# --------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_clips() -> None:
    first, second = fresh(3, 10), fresh(3, 10)
    assert [clip.change for clip in first] == [clip.change for clip in second]
    for one, other in zip(first, second, strict=True):
        assert [frame.tobytes() for frame in one.frames] == [frame.tobytes() for frame in other.frames]


def test_what_is_said_follows_from_the_ends() -> None:
    """Of the shapes of the first frame and of the last; and the pixels differ where anything changes."""
    for clip in fresh(4, 60):
        change, before, after = clip.change, set(clip.before.shapes), set(clip.after.shapes)
        assert len(clip.frames) in clips.FRAMES
        gone, new = before - after, after - before
        expected = {
            "turned": ({change.shape}, {world.Shape(change.shape.kind, change.what)} if change.shape else set()),
            "appeared": (set(), {change.shape}),
            "disappeared": ({change.shape}, set()),
        }
        assert (gone, new) == expected.get(change.kind, (set(), set()))
        first, last = (np.asarray(clip.frames[place]).astype(int) for place in (0, -1))
        changed = float((np.abs(first - last).max(-1) > 60).mean())
        assert (changed > 0.005) == (change.kind != "nothing"), (change, changed)


def test_a_shape_moves_where_it_is_said_to() -> None:
    """By its colour's place in frames whose other shapes have other colours."""
    rng, told = Random(5), set()
    for _ in range(80):
        clip = clips.make_clip(rng, "moved")
        assert clip.change.shape is not None
        if [shape.color for shape in clip.before.shapes].count(clip.change.shape.color) > 1:
            continue
        color = np.array(world.COLORS[clip.change.shape.color])
        places = []
        for frame in (clip.frames[0], clip.frames[-1]):
            near = np.abs(np.asarray(frame).astype(int) - color).max(-1) < 25
            places.append([axis.mean() for axis in near.nonzero()])
        right, down = clips.DIRECTIONS[clip.change.what]
        way = (places[1][1] - places[0][1]) * right + (places[1][0] - places[0][0]) * down
        assert way > 0.2 * min(clip.frames[0].size), clip.change
        told.add(clip.change.what)
    assert told == set(clips.DIRECTIONS)


def test_training_never_has_what_is_held_out_and_the_exam_does() -> None:
    rng = Random(6)
    for _ in range(100):
        clip, chat = clip_chats.clip_chat(rng)
        assert not clip.held_out and chat[-1]["role"] == "assistant"
        assert sum(message["content"].count(clip_chats.VIDEO) for message in chat) == 1
    items = clip_chats.clip_exam(Random(7), 60)
    assert sum(item.clip.held_out for item in items) >= 30
    assert {item.clip.change.kind for item in items} == set(clips.CHANGES)
    assert sum(item.question.kind == "what changed" for item in items) == 40


def test_every_answer_about_clips_has_a_french_one() -> None:
    rng, said = Random(8), {}
    for _ in range(300):
        _, chat = clip_chats.clip_chat(rng)
        for question, answer in pairwise(chat):
            if answer["role"] == "assistant":
                said[answer["content"]] = styles.french(question["content"], answer["content"])
    assert len(said) > 100 and all(text[-1] == "." for text in said.values())
    assert {answer for answer, text in said.items() if text == answer} <= {"Orange."}
    assert styles.french(ASKED, "The red star moved to the left.") == "L'étoile rouge est allée à gauche."
    assert styles.french(ASKED, "The red circle turned green.") == "Le cercle rouge est devenu vert."
    assert styles.french(ASKED, "A blue star appeared.") == "Une étoile bleue est apparue."
    assert styles.french(ASKED, "Nothing changed.") == "Rien n'a changé."
