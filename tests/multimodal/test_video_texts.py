"""Texts, chats and token ids with videos: the ids are those that transformers' processors make of the whole text.

What stands before a video runs together with what its processor writes for it: "User: " and "You are provided" are
other tokens than "User: You are provided".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import StructuredOutputsParams
from quire.config import MediaConfig
from quire.errors import RequestError
from quire.models.loader import load_model
from quire.models.vision.video import in_words
from quire.multimodal.video_processor import VideoProcessor
from quire.multimodal.video_sampling import Clip
from tests.multimodal.clips import clip, encoded
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, build, picture
from tests.multimodal.video_models import VIDEO_FAMILIES, VideoOracle, first_variant

GLM, INTERNVL, SMOLVLM = (f"{name}ForConditionalGeneration" for name in ("Glm4v", "InternVL", "SmolVLM"))
# The marker in a text, what the families' templates have around it, and around an image's.
WRITTEN = {
    GLM: ("<|begin_of_video|><|video|><|end_of_video|>", "<|begin_of_image|><|image|><|end_of_image|>"),
    INTERNVL: ("<video>", "<IMG_CONTEXT>"),
    SMOLVLM: ("<video>", "<image>"),
}
MARKERS = {GLM: "<|video|>", INTERNVL: "<video>", SMOLVLM: "<video>"}
TEXTS = [
    "{v}", "User: {v}What is it?", "the{v}\n\nwhat", "x {v} {v}\ny", "a\n{v} \n{i}what", "{i} and{v}{i}", "0{v}0",
    "no video, {i}",
]  # fmt: skip
CLIPS = [clip(1, 3), clip(2, 12, 24, 40)]
RATE = 1.5


@pytest.fixture(scope="module", params=[GLM, INTERNVL, SMOLVLM])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, VideoOracle, Any]:
    """(architecture, transformers' side, ours)"""
    folder = tmp_path_factory.mktemp("video")
    oracle = VideoOracle(request.param, first_variant(request.param), folder)
    return request.param, oracle, open_llm(oracle.path, skip_tokenizer_init=False, num_gpu_blocks_override=600)


def media(videos: list[Any], images: list[Any], **more: Any) -> dict[str, Any]:
    rated = [(video, {"fps": RATE, "do_sample_frames": False, **more}) for video in videos]
    return {"multi_modal_data": {kind: own for kind, own in (("video", rated), ("image", images)) if own}}


def expected(architecture: str, oracle: VideoOracle, text: str, videos: list[Any], images: list[Any]) -> list[int]:
    """Every marker replaced in the text, and all of that made tokens, as transformers' processors do."""
    image = FAMILIES[architecture].words[IMAGE]
    parts, shown = text.split(MARKERS[architecture]), [oracle.text(video, RATE) for video in videos]
    pictures = iter(images)
    own = [_with_images(oracle, part, image, pictures) for part in parts]
    whole = own[0] + "".join(video + part for video, part in zip(shown, own[1:], strict=True))
    return oracle.tokenizer.encode(whole, add_special_tokens=False)


def _with_images(oracle: VideoOracle, text: str, marker: str, images: Any) -> str:
    first, *rest = text.split(marker)
    return first + "".join(
        oracle.tokenizer.decode(oracle.images.ids(oracle.tokenizer, next(images)), skip_special_tokens=False) + part
        for part in rest
    )


@pytest.mark.parametrize("form", TEXTS)
def test_texts_and_their_ids(both: tuple[str, VideoOracle, Any], form: str) -> None:
    architecture, oracle, llm = both
    video, image = WRITTEN[architecture]
    text = form.format(v=video, i=image)
    videos = CLIPS[: form.count("{v}")]
    images = [picture(number, (24, 24)) for number in range(form.count("{i}"))]
    ids = expected(architecture, oracle, text, videos, images)
    given = media(videos, images)
    (written,) = ask(llm, [{"prompt": text, **given}])
    assert list(written.prompt_token_ids) == ids
    # As a caller's ids with all placeholders, as transformers' processor leaves them.
    (placed,) = ask(llm, [{"prompt_token_ids": ids, **given}])
    assert list(placed.prompt_token_ids) == ids
    assert placed.outputs[0].token_ids == written.outputs[0].token_ids
    nothing_left(llm)


def test_ids_with_a_marker_have_all_of_the_video_s_text(both: tuple[str, VideoOracle, Any]) -> None:
    """Also where a caller wrote what stands around it already."""
    architecture, oracle, llm = both
    marker = VIDEO_FAMILIES[architecture].marker
    before, behind = llm.llm_engine.executor.runner.model.around_video_marker
    own = oracle.tokenizer.encode(oracle.text(CLIPS[0], RATE), add_special_tokens=False)
    texts = [oracle.tokenizer.encode(text, add_special_tokens=False) if text else [] for text in (before, behind)]
    for ids in ([5, marker, 7], [5, *texts[0], marker, *texts[1], 7]):
        (output,) = ask(llm, [{"prompt_token_ids": ids, **media(CLIPS[:1], [])}])
        assert list(output.prompt_token_ids) == [5, *own, 7]
    nothing_left(llm)


TEMPLATE = (
    "{{% for m in messages %}}{{{{ m.role }}}}: {{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
    "{{% for p in m.content %}}{{% if p.type == 'video' %}}{v}{{% elif p.type == 'image' %}}{i}"
    "{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}"
)


def test_chats(both: tuple[str, VideoOracle, Any]) -> None:
    """What a user types is no video, be it the marker's text."""
    architecture, oracle, llm = both
    video, image = WRITTEN[architecture]
    typed = MARKERS[architecture]
    shown = picture(1, (24, 24))
    messages = [
        {"role": "user", "content": [{"type": "video", "video": list(CLIPS[0])}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A star."},
        {"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": f"a {typed} b"}]},
    ]
    output = llm.chat(messages, greedy(), use_tqdm=False, chat_template=TEMPLATE.format(v=video, i=image))[0]
    found = list(output.prompt_token_ids)
    begin = expected_chat(architecture, oracle, f"user: {video}What?\nassistant: A star.\nuser: {image}a ")
    assert found[: len(begin)] == begin
    assert llm.get_tokenizer().convert_tokens_to_ids(typed) not in found
    assert llm.get_tokenizer().decode(found[len(begin) :]).replace(" ", "") == f"{typed}b\n".replace(" ", "")
    nothing_left(llm)


def expected_chat(architecture: str, oracle: VideoOracle, text: str) -> list[int]:
    """As `expected`, of frames without a rate."""
    head, tail = text.split(MARKERS[architecture])
    written = oracle.text(CLIPS[0], None)
    rest = _with_images(oracle, tail, FAMILIES[architecture].words[IMAGE], iter([picture(1, (24, 24))]))
    return oracle.tokenizer.encode(head + written + rest, add_special_tokens=False)


def test_too_few_and_too_many(both: tuple[str, VideoOracle, Any]) -> None:
    architecture, oracle, llm = both
    marker = VIDEO_FAMILIES[architecture].marker
    ids = oracle.tokenizer.encode(oracle.text(CLIPS[0], RATE), add_special_tokens=False)
    with pytest.raises(RequestError, match="2 video markers and 1 video"):
        ask(llm, [{"prompt": "".join(WRITTEN[architecture][:1] * 2), **media(CLIPS[:1], [])}])
    with pytest.raises(RequestError, match="1 video marker and 0 videos"):
        ask(llm, [{"prompt_token_ids": [5, marker]}])
    with pytest.raises(RequestError, match="0 video markers and 1 video"):
        ask(llm, [{"prompt_token_ids": [5, 6], **media(CLIPS[:1], [])}])
    # Placeholders of other frames, of too many videos, and of an image that is none.
    for wrong, videos in ((ids[:-3], CLIPS[:1]), (ids, CLIPS[:2]), ([*ids, IMAGE], CLIPS[:1])):
        (output,) = ask(llm, [{"prompt_token_ids": [5, *wrong, 7], **media(videos, [])}])
        assert "there must be one marker for each" in error_of(output)
    nothing_left(llm)


def test_files_and_their_length(both: tuple[str, VideoOracle, Any]) -> None:
    """A file says how long it is; of frames, nobody but the last one's time may."""
    pytest.importorskip("av")
    architecture, oracle, llm = both
    marker, video = VIDEO_FAMILIES[architecture].marker, clip(3, 8)
    data = encoded(video, rate=2)
    (output,) = ask(
        llm,
        [{"prompt_token_ids": [5, marker], "multi_modal_data": {"video": data},
          "mm_processor_kwargs": {"do_sample_frames": False}}],
    )  # fmt: skip
    text = oracle.text(video, 2.0, 4.0)
    assert list(output.prompt_token_ids) == [5, *oracle.tokenizer.encode(text, add_special_tokens=False)]
    if architecture == SMOLVLM:
        assert "eight frames from a 0:00:04 [H:MM:SS]" in text
        assert "eight frames from a 0:00:03 [H:MM:SS]" in oracle.text(video, 2.0)
        told = [(video, {"fps": 2.0, "duration": 90061.5, "do_sample_frames": False})]
        (output,) = ask(llm, [{"prompt_token_ids": [5, marker], "multi_modal_data": {"video": told}}])
        text = oracle.text(video, 2.0, 90061.5)
        assert "a 1 day, 1:01:01 [H:MM:SS]" in text
        assert list(output.prompt_token_ids) == [5, *oracle.tokenizer.encode(text, add_special_tokens=False)]
    nothing_left(llm)


def test_a_tokenizer_of_its_own_is_loaded_where_the_engine_has_none(tmp_path: Path) -> None:
    oracle = VideoOracle(SMOLVLM, first_variant(SMOLVLM), tmp_path)
    llm = open_llm(oracle.path)
    (output,) = ask(llm, [{"prompt_token_ids": [5, VIDEO_FAMILIES[SMOLVLM].marker, 7], **media(CLIPS[:1], [])}])
    own = oracle.tokenizer.encode(oracle.text(CLIPS[0], RATE), add_special_tokens=False)
    assert list(output.prompt_token_ids) == [5, *own, 7]


def test_images_are_as_before(both: tuple[str, VideoOracle, Any]) -> None:
    """The marker that a tokenizer has learned is no token of the model's: its vocabulary ends where it did."""
    llm = both[2]
    given = {"prompt_token_ids": [5, IMAGE, 7], "multi_modal_data": {"image": picture(1, (24, 24))}}
    (output,) = ask(llm, [given], greedy(4, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    shaped = greedy(4, structured_outputs=StructuredOutputsParams(regex="[ab]{2}"))
    (output,) = ask(llm, [given], shaped)
    assert len(output.outputs[0].text) == 2 and set(output.outputs[0].text) <= set("ab")


def test_a_video_is_not_the_images_that_its_frames_are(both: tuple[str, VideoOracle, Any]) -> None:
    architecture, _, llm = both
    frame = CLIPS[0][:1].repeat(2, 0)
    video = {"prompt_token_ids": [5, VIDEO_FAMILIES[architecture].marker, 7], **media([frame], [])}
    images = {"prompt_token_ids": [5, IMAGE, IMAGE, 7], **media([], [Image.fromarray(one) for one in frame])}
    together = [list(output.prompt_token_ids) for output in ask(llm, [video, images])]
    assert together[0] != together[1]
    nothing_left(llm)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (1, "one"), (8, "eight"), (13, "thirteen"), (20, "twenty"), (21, "twenty-one"), (64, "sixty-four"),
        (90, "ninety"), (100, "one hundred"), (101, "one hundred and one"), (342, "three hundred and forty-two"),
        (1000, "one thousand"), (1001, "one thousand and one"), (1100, "one thousand, one hundred"),
        (12345, "twelve thousand, three hundred and forty-five"), (1_000_001, "one million and one"),
        (2_300_040, "two million, three hundred thousand and forty"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_num2words(number: int, words: str) -> None:
    """What num2words 0.5.14 says, which transformers' processor of SmolVLM asks."""
    assert in_words(number) == words


def test_smolvlm_s_settings_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """`video_sampling` says how many frames; a size beside it goes before its own."""
    own = {"max_frames": 5, "fps": 1, "video_size": {"longest_edge": 40}}
    for more, size in (({}, 40), ({"size": {"longest_edge": 60}}, 60)):
        text = {"video_processor_type": "SmolVLMVideoProcessor", "video_sampling": own, **more}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(text))
        processor = VideoProcessor(tmp_path, MediaConfig(), "none")
        assert processor.known["size"] == {"longest_edge": size}
        assert processor.choose(Clip(40, 10.0, 4.0), {}, False) == [0, 13, 26, 39]
        assert len(processor.choose(Clip(400, 10.0, 40.0), {}, False)) == 5


def test_a_tokenizer_that_joins_words_takes_no_videos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands before a video could not be known then."""
    model = load_model(build(SMOLVLM, first_variant(SMOLVLM), tmp_path))
    tokens = {"<image>": [IMAGE], "<video>": [384]}
    model.read_processor({}, lambda text: tokens.get(text, [len(text)]))
    assert "video" not in model.media_marker_ids and "joins words" in caplog.text


@pytest.mark.parametrize("architecture", [INTERNVL, SMOLVLM])
def test_frames_of_another_size_are_refused(architecture: str, tmp_path: Path) -> None:
    model = load_model(build(architecture, first_variant(architecture), tmp_path))
    frames = torch.zeros(1, 2, 3, 12, 24)
    with pytest.raises(ValueError, match=r"\[.*3, 12, 24\] of it, and the tower takes"):
        model.video_layout({"pixel_values": frames, "pixel_values_videos": frames, "frame_times": np.zeros(2)})
