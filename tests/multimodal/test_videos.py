"""Videos in prompts: frames and files, against transformers, and what must not change by anything beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import RequestError
from quire.models.loader import load_model
from quire.multimodal.video_processor import VideoProcessor
from tests.multimodal.clips import clip, compressed, encoded
from tests.multimodal.families.qwen import FAMILIES
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, open_llm, tokens
from tests.multimodal.tiny_vision import IMAGE, VOCAB, build, make, picture

VIDEO = VOCAB - 2
SETTINGS = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 4, "temporal_patch_size": 2,
            "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 512}}  # fmt: skip
ROWS = [("Qwen2VLForConditionalGeneration", "mrope"), ("Qwen2_5_VLForConditionalGeneration", "windows")]
SLOW = [(name, variant) for name, _ in ROWS for variant in FAMILIES[name].variants if (name, variant) not in ROWS]


def made(architecture: str, variant: str, folder: Path, model=None) -> str:
    path = build(architecture, variant, folder, model)
    tower = make(architecture, variant).config.vision_config
    own = {"patch_size": tower.patch_size, "temporal_patch_size": tower.temporal_patch_size,
           "merge_size": tower.spatial_merge_size}  # fmt: skip
    (path / "video_preprocessor_config.json").write_text(json.dumps({**SETTINGS, **own}))
    return str(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return made(*ROWS[0], tmp_path_factory.mktemp("qwen"))


def asked(ids, videos=(), images=(), **more):
    data = {kind: list(given) for kind, given in (("video", videos), ("image", images)) if given}
    return {"prompt_token_ids": list(ids), "multi_modal_data": data, **more}


def one(video, **more):
    return asked([5, 6, VIDEO, 7, 8], [video], **more)


class Theirs:
    """A variant in transformers, with videos."""

    def __init__(self, architecture, variant, path) -> None:
        self.model = make(architecture, variant).double()
        self.processor = VideoProcessor(Path(path), llm_config(), "none")
        self.images = FAMILIES[architecture].processor(FAMILIES[architecture].variants[variant])

    def inputs(self, video, rate=None):
        plan = self.processor.plan(*video.shape[:3], {})
        frames = [torch.from_numpy(frame).permute(2, 0, 1).contiguous() for frame in video]
        return self.processor.finish([self.processor.resized(frame, plan, {}) for frame in frames], {})

    @torch.inference_mode()
    def features(self, inputs):
        pixels = inputs["pixel_values_videos"].double()
        return self.model.get_video_features(pixels, inputs["video_grid_thw"]).pooler_output[0]

    @torch.inference_mode()
    def answer(self, ids, videos, images, count, seconds):
        given = [self.inputs(video) for video in videos]
        pictures = dict(self.images(images, return_tensors="pt")) if images else {}
        merge = self.model.config.vision_config.spatial_merge_size**2
        lengths = {
            VIDEO: iter([int(one["video_grid_thw"].prod()) // merge for one in given]),
            IMAGE: iter([int(grid.prod()) // merge for grid in pictures.get("image_grid_thw", ())]),
        }
        expanded = [token for one in ids for token in ([one] * next(lengths[one]) if one in lengths else [one])]
        kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in expanded]
        more = (
            {"second_per_grid_ts": torch.tensor(seconds)}
            if hasattr(self.model.config.vision_config, "tokens_per_second")
            else {}
        )
        if pictures:
            more |= {"pixel_values": pictures["pixel_values"].double(), "image_grid_thw": pictures["image_grid_thw"]}
        if given:
            more["pixel_values_videos"] = torch.cat([one["pixel_values_videos"] for one in given]).double()
            more["video_grid_thw"] = torch.cat([one["video_grid_thw"] for one in given])
        out = self.model.generate(
            input_ids=torch.tensor([expanded]), attention_mask=torch.ones(1, len(expanded), dtype=torch.int64),
            mm_token_type_ids=torch.tensor([kinds]), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0, **more,
        )  # fmt: skip
        return expanded, out[0, len(expanded) :].tolist()


def llm_config():
    from quire.config import MediaConfig

    return MediaConfig()


def check_parity(architecture, variant, folder):
    theirs_path = made(architecture, variant, folder)
    theirs = Theirs(architecture, variant, theirs_path)
    model = load_model(theirs_path)
    clips = [clip(1, 2), clip(2, 5, 24, 24), clip(3, 8, 30, 70)]
    for video in clips:
        inputs = theirs.inputs(video)
        with torch.inference_mode():
            ours = model.encode_video(inputs)
        assert (ours - theirs.features(inputs)).abs().max() < 1e-4 and ours.std() > 0.1
    span = theirs.model.config.vision_config.temporal_patch_size
    rated = (clips[1], {"fps": 4.0, "do_sample_frames": False})
    prompts = [
        ([5, VIDEO, 7, 8], [clips[0]], [], [span / 24]),
        ([5, VIDEO, 7, VIDEO, 8, 9], [clips[2], rated], [], [span / 24, span / 4]),
        ([5, IMAGE, 7, VIDEO, 8, IMAGE, 9], [clips[1]], [picture(1, (40, 30)), picture(2, (24, 60))], [span / 24]),
        ([5, 6, 7], [], [], []),
    ]
    llm = open_llm(theirs_path, max_num_batched_tokens=13, block_size=4, num_gpu_blocks_override=72)
    outputs = ask(llm, [asked(ids, videos, images) for ids, videos, images, _ in prompts], greedy(32))
    for (ids, videos, images, seconds), output in zip(prompts, outputs, strict=True):
        plain = [video[0] if isinstance(video, tuple) else video for video in videos]
        expanded, answer = theirs.answer(ids, plain, images, 32, seconds)
        assert output.prompt_token_ids == expanded
        assert output.outputs[0].token_ids == answer
    nothing_left(llm)


@pytest.mark.parametrize(("architecture", "variant"), ROWS)
def test_parity(architecture, variant, tmp_path):
    check_parity(architecture, variant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant"), SLOW)
def test_parity_of_further_variants(architecture, variant, tmp_path):
    check_parity(architecture, variant, tmp_path)


@pytest.mark.parametrize(("architecture", "variant"), ROWS)
def test_an_answer_goes_on_as_a_text_would(architecture, variant, tmp_path):
    """Behind a video that is longer in time than its sides are; and where a prompt ends in a video or an image."""
    path = made(architecture, variant, tmp_path)
    theirs, llm = Theirs(architecture, variant, path), open_llm(path)
    span, video = theirs.model.config.vision_config.temporal_patch_size, clip(1, 24, 16, 16)
    long = (video, {"fps": 2.0, "do_sample_frames": False})
    for ids in ([5, VIDEO, 7, 8], [5, VIDEO, 7, VIDEO, 9]):
        videos = [long] * ids.count(VIDEO)
        _, answer = theirs.answer(ids, [video] * len(videos), [], 16, [span / 2] * len(videos))
        assert ask(llm, asked(ids, videos), greedy(16))[0].outputs[0].token_ids == answer
    for ids, media in (([5, VIDEO], {"videos": [long]}), ([5, IMAGE], {"images": [picture(1, (24, 60))]})):
        whole = ask(llm, asked(ids, **media), greedy(16))[0].outputs[0].token_ids
        for known in (1, 5):
            (rest,) = ask(llm, asked([*ids, *whole[:known]], **media), greedy(16 - known))
            assert rest.outputs[0].token_ids == whole[known:]
    nothing_left(llm)


def test_one_video_in_all_its_forms_gives_one_answer(qwen, tmp_path):
    """Images, arrays, tensors and a file without loss: the same frames, the same tokens, encoded once."""
    pytest.importorskip("av")
    from PIL import Image

    video = clip(4, 6)
    data = encoded(video)
    (tmp_path / "clip.mkv").write_bytes(data)
    llm = open_llm(qwen, allowed_local_media_path=str(tmp_path))
    forms = [
        video,
        [Image.fromarray(frame) for frame in video],
        list(video),
        torch.from_numpy(video),
        torch.from_numpy(video).permute(0, 3, 1, 2),
        (video, {"fps": 10.0, "do_sample_frames": False}),
    ]
    files = [data, tmp_path / "clip.mkv", str(tmp_path / "clip.mkv"), (tmp_path / "clip.mkv").as_uri()]
    answers = [tokens(llm, one(form))[0] for form in forms]
    assert answers == answers[:1] * len(forms)
    found = [tokens(llm, one(form))[0] for form in files]
    assert found == answers[:1] * len(files)
    assert tokens(llm, one(clip(5, 6)))[0] != answers[0]
    nothing_left(llm)


def test_the_same_bits_alone_and_in_a_crowd(qwen):
    rng = np.random.default_rng(3)
    crowd = []
    for number in range(8):
        videos = [clip(number % 3, 2 + number, 24, 32)] * (1 + number % 2)
        images = [picture(number, (30, 40))] * (number % 3)
        ids = [VIDEO] * len(videos) + [IMAGE] * len(images) + [9, 10, 11]
        rng.shuffle(ids)
        crowd.append(asked([4, *(int(token) for token in ids)], videos, images))
    llm = open_llm(qwen, max_num_batched_tokens=17, block_size=4, num_gpu_blocks_override=90)
    together = tokens(llm, *crowd)
    quiet = open_llm(qwen, enable_prefix_caching=False)
    assert together == [tokens(quiet, prompt)[0] for prompt in crowd]
    nothing_left(llm)


def test_features_that_were_evicted_are_made_again(qwen):
    llm = open_llm(qwen, features=90, num_gpu_blocks_override=60, block_size=4)
    prompts = [one(clip(number, 4, 32, 32)) for number in range(6)]
    assert tokens(llm, *prompts) == [tokens(llm, prompt)[0] for prompt in prompts]
    nothing_left(llm)


def test_which_frames(qwen):
    video = clip(6, 12, 24, 24)
    llm = open_llm(qwen)
    (few,) = tokens(llm, one(video, mm_processor_kwargs={"num_frames": 4}))
    assert few == tokens(llm, one(video[[0, 3, 6, 9]]))[0]
    (slow,) = tokens(llm, one((video, {"fps": 4.0}), mm_processor_kwargs={"videos_kwargs": {"fps": 2}}))
    assert slow == tokens(llm, one(video[[0, 2, 4, 6, 8, 10]]))[0]
    with_own = open_llm(qwen, media_io_kwargs={"video": {"num_frames": 4}})
    assert tokens(with_own, one(video))[0] == few
    assert tokens(with_own, one(video, mm_processor_kwargs={"num_frames": 6})) != [few]


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([], {}, "it has no frames"),
        (np.zeros((2, 8, 8, 3), np.float32), {}, "an array must be uint8 of shape"),
        (b"", {}, "it has no bytes"),
        (b"nothing of this kind", {}, "no video in one of the containers MP4/MOV, WebM/Matroska"),
        (("x", {}), {}, "a text must be a URL"),
        ("http://localhost/clip.mp4", {}, "http: and https: URLs are off"),
        (Path("/nowhere/at.mp4"), {}, "the file cannot be read"),
        ("data:image/png;base64,AAAA", {}, "data:video/mp4;base64"),
        ([picture(1, (8, 8)), picture(1, (9, 8))], {}, "not all of one size"),
        ([picture(1, (8, 8)), 3], {}, "a frame must be"),
        ((clip(1, 2), {"fps": -1}), {}, "fps=-1 must be a number above 0"),
        ((clip(1, 2), {"total_num_frames": 9}), {}, "by frames_indices"),
        ((clip(1, 2), {"colour": 9}), {}, "metadata has"),
        (clip(1, 9), {}, "9 frames would be taken, and 8 are allowed"),
        (clip(1, 2), {"fps": 2}, "needs to know how many frames a second"),
        (clip(1, 2), {"num_frames": 4}, "4 frames are asked for, and it has 2"),
        (clip(1, 2, 8, 4000), {}, "more than 200 times"),
    ],
)
def test_what_is_wrong_with_a_video_is_said(qwen, given, settings, message):
    llm = limited(qwen)
    before = tokens(llm, one(clip(1, 2)))
    try:
        (output,) = ask(llm, [one(given, mm_processor_kwargs=settings)])
        error = error_of(output)
    except RequestError as refused:
        error = str(refused)
    assert message in error and "0x" not in error
    assert tokens(llm, one(clip(1, 2))) == before
    nothing_left(llm)


_LIMITED = {}


def limited(path):
    if path not in _LIMITED:
        _LIMITED[path] = open_llm(path, max_video_frames=8)
    return _LIMITED[path]


def test_limits_of_a_prompt(qwen):
    llm = open_llm(qwen, limit_mm_per_prompt={"video": 1})
    with pytest.raises(RequestError, match=r"has 2 of video, and 1 are allowed: .* limit_mm_per_prompt"):
        ask(llm, asked([VIDEO, VIDEO], [clip(1, 2)] * 2))
    with pytest.raises(RequestError, match="1 video marker and 0 videos"):
        ask(llm, asked([VIDEO, IMAGE], [], [picture(1, (8, 8))]))


def test_a_model_without_videos_refuses_them(paths):
    llm = open_llm(str(paths["llava"]))
    with pytest.raises(RequestError, match="has 'video', and this model takes image"):
        ask(llm, asked([5, 6], [clip(1, 2)]))


def test_files_are_cut_by_their_own_frames(qwen):
    """Compressed files, whose frames are stored out of order and depend on others, give those of their places."""
    av = pytest.importorskip("av")
    import io

    data = compressed(clip(7, 40))
    with av.open(io.BytesIO(data)) as container:
        whole = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    llm = open_llm(qwen)
    for count in (2, 4, 32):
        places = [place * 40 // count for place in range(count)]
        (output,) = tokens(llm, one(data, mm_processor_kwargs={"num_frames": count}))
        assert output == tokens(llm, one(np.stack([whole[place] for place in places])))[0]
    nothing_left(llm)
