"""Features given in place of images, and settings given for the image processor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quire import LLM, QuireError, RequestError
from quire.multimodal import load_picture
from tests.multimodal.open_engine import alone, ask, error_of, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.tiny_vision import IMAGE, picture

A, B = picture(1, (30, 100)), picture(2, (24, 24))


@pytest.fixture(scope="module")
def llm(path):
    """One for all tests of a kind: each leaves it as it was."""
    return open_llm(path, max_num_batched_tokens=20)


@pytest.fixture(autouse=True)
def leaves_nothing(llm):
    yield
    nothing_left(llm)
    assert tokens(llm, [5, 6, 7]) == tokens(llm, [5, 6, 7])


@torch.inference_mode()
def seen(llm: LLM, *images) -> list[dict[str, torch.Tensor]]:
    """Each image as features: {"image_embeds": [tokens, E], "image_grid_thw": [1, 3], for models that know it}."""
    engine = llm.llm_engine
    found = []
    for image in images:
        inputs = engine.media.preprocessor.processor._processor(image, return_tensors="pt")
        grid = {"image_grid_thw": inputs["image_grid_thw"]} if "image_grid_thw" in inputs else {}
        found.append({"image_embeds": engine.executor.runner.model.encode(inputs).clone(), **grid})
    return found


def given(data, images: int = 1, key: str = "image_embeds") -> dict:
    return {"prompt_token_ids": [5, *[IMAGE, 6] * images], "multi_modal_data": {key: data}}


def forms(llm: LLM) -> list[dict]:
    """One image, in every form."""
    (features,) = seen(llm, A)
    plain = features["image_embeds"]
    made = [given(features), given(features, key="image"), given([features], key="image"), given([features])]
    if "image_grid_thw" in features:
        grid = features["image_grid_thw"]
        return [*made, given([{**features, "image_grid_thw": grid[0].tolist()}])]
    return [*made, given(plain), given([plain]), given(plain[None]), given([plain], key="image"), given(plain.double())]


def test_features_answer_as_their_image_does(llm):
    (expected,) = tokens(llm, given([A], key="image"))
    for data in forms(llm):
        assert tokens(llm, data) == [expected]


def test_features_of_several_images(llm, kind):
    first, second = seen(llm, A, B)
    (expected,) = tokens(llm, given([A, B], 2, key="image"))
    assert tokens(llm, given([first, B], 2, key="image")) == [expected]
    assert tokens(llm, given([first, second], 2)) == [expected]
    if kind.name == "qwen":  # vLLM's form: end to end, cut by their grids
        embeds = torch.cat([first["image_embeds"], second["image_embeds"]])
        grids = torch.cat([first["image_grid_thw"], second["image_grid_thw"]])
        assert tokens(llm, given({"image_embeds": embeds, "image_grid_thw": grids}, 2)) == [expected]
    elif kind.name == "llava":
        assert tokens(llm, given(torch.stack([one["image_embeds"] for one in (first, second)]), 2)) == [expected]


def test_features_are_told_apart(llm, path):
    """By their values and by their grid, and they are not the image's own: they may be of any making."""
    (features,) = seen(llm, A)
    other = {**features, "image_embeds": features["image_embeds"] + 1}
    answers = [tokens(llm, given(one)) for one in (features, other, features)]
    assert answers[0] == answers[2] != answers[1]
    if "image_grid_thw" in features:
        turned = {**features, "image_grid_thw": features["image_grid_thw"][:, [0, 2, 1]]}
        assert tokens(llm, given(turned)) == alone(path, given(turned)) != answers[0]
        assert tokens(llm, given(features)) == answers[0] == alone(path, given(features))


def test_prompts_as_embeddings_beside_images(path):
    """Of a model that sees: rows of tokens answer as the tokens, among requests with images; images go with tokens."""
    llm = open_llm(path, enable_prompt_embeds=True, max_num_batched_tokens=23, features=200)
    ids = [[5, 6, 7], list(range(8, 48)), [9]]
    expected = tokens(llm, *ids, one(A))
    rows = [llm.llm_engine.executor.runner.model.embed(torch.tensor(given)).clone() for given in ids]
    assert tokens(llm, *({"prompt_embeds": given} for given in rows), one(A)) == expected
    nothing_left(llm)
    with pytest.raises(RequestError, match="prompt_embeds are the whole prompt"):
        ask(llm, {"prompt_embeds": rows[0], "multi_modal_data": {"image": A}})


BAD = {
    "width": (torch.zeros(9, 31), "image_embeds must be a dense float tensor [tokens, 32], not [9, 31]"),
    "no tokens": (torch.zeros(0, 32), "not [0, 32]"),
    "one dimension": (torch.zeros(32), "not [32]"),
    "whole numbers": (torch.zeros(9, 32, dtype=torch.int64), "not torch.int64"),
    "sparse": (torch.zeros(9, 32).to_sparse(), "torch.sparse_coo"),
    "sparse, several": (torch.zeros(1, 9, 32).to_sparse(), "torch.sparse_coo"),
    "NaN": (torch.full((9, 32), torch.nan), "infinite or no numbers"),
    "infinite": (torch.full((9, 32), torch.inf), "infinite or no numbers"),
    "an array": (np.zeros((9, 32), np.float32), "not ndarray"),
    "nested": (torch.nested.nested_tensor([torch.zeros(32)] * 2), "cannot be prepared"),
    "without values": (torch.zeros(9, 32, device="meta"), "cannot be prepared"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_features_are_named(llm, kind, name):
    tensor, message = BAD[name]
    good = seen(llm, B)[0]
    data = [B, {"image_embeds": tensor, **({"image_grid_thw": [1, 6, 6]} if kind.name == "qwen" else {})}, good]
    (expected,) = tokens(llm, one(A))
    failed, neighbour = ask(llm, [given(data, 3, key="image"), one(A)])
    assert "image 1: " in error_of(failed) and message in error_of(failed)
    assert neighbour.outputs[0].token_ids == expected
    if name == "sparse, several":
        assert "image 0: " in error_of(ask(llm, given(tensor))[0])


GRIDS = {
    "too large": ([1, 6, 8], "asks for 12 rows of image_embeds, not 9"),
    "odd": ([1, 3, 12], "a multiple of 2"),
    "negative": ([1, -6, -6], "a multiple of 2"),
    "frames": ([2, 6, 6], "its grid of patches is [2, 6, 6]"),
    "two numbers": ([6, 6], "must be three whole numbers"),
    "fractions": ([1.0, 6.0, 6.0], "must be three whole numbers"),
    "words": ("abc", "image 0: "),
}


@pytest.mark.parametrize("name", GRIDS)
def test_wrong_grids_are_named(llm, kind, name):
    grid, message = GRIDS[name]
    data = {"image_embeds": torch.zeros(9, 32), "image_grid_thw": grid}
    error = error_of(ask(llm, given([data], key="image"))[0])
    assert "image 0: " in error
    if kind.name == "qwen":
        assert message in error
    elif name not in ("two numbers", "fractions", "words"):
        assert "take no image_grid_thw" in error


@pytest.mark.parametrize("grids", [None, [[1.0, 6.0, 6.0]], [[1, 6, 6], [1, 6, 6]], [1, 6], "abc", [[0, 0, 0]] * 2])
def test_grids_that_do_not_cut_the_features(llm, kind, grids):
    data = given({"image_embeds": torch.zeros(9, 32), "image_grid_thw": grids})
    if grids is None:
        output = ask(llm, data)[0]
        assert kind.name != "qwen" or "image 0: this model's image_embeds need image_grid_thw" in error_of(output)
        return
    with pytest.raises(RequestError, match=r"image_grid_thw must be \[images, 3\]|images, and|0 rows|markers? and"):
        raise RequestError(error_of(ask(llm, data)[0]))


def test_features_without_a_grid_where_one_is_needed(llm, kind):
    if kind.name == "qwen":
        for data in (given(torch.zeros(9, 32)), given([B, torch.zeros(9, 32)], 2, key="image")):
            assert "this model's image_embeds need image_grid_thw" in error_of(ask(llm, data)[0])


# Settings of the image processor

VALID = {
    "llava": [{"do_normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}, {"image_mean": [0, 1, 0]}, {"resample": 0}],
    "next": [{"do_normalize": False}, {"do_pad": True, "image_std": [0.5, 0.5, 0.5]}],
    "qwen": [{"size": {"shortest_edge": 64, "longest_edge": 512}}, {"max_pixels": 512}, {"do_rescale": False}],
}


@pytest.mark.filterwarnings("ignore")
def test_settings_change_the_answer(llm, kind):
    plain = tokens(llm, one(A))
    for settings in VALID[kind.name]:
        assert tokens(llm, one(A, mm_processor_kwargs=settings)) != plain
    assert tokens(llm, one(A, mm_processor_kwargs={})) == tokens(llm, one(A, mm_processor_kwargs=None)) == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_such_thing": 1}, r"has no setting 'no_such_thing'; it has .*do_normalize"),
        ({"return_tensors": "np"}, "has no setting 'return_tensors'"),
        ({"device": "cuda"}, "has no setting 'device'"),
        ({"size": {"height": 10_000, "width": 10_000}}, "more than max_image_pixels=50,000,000"),
        ({"size": {"shortest_edge": 10**9, "longest_edge": 10**9}}, "more than max_image_pixels|must be a dict"),
        ({"size": [3000, 3000]}, "must be a dict of whole numbers"),
        ({"size": {"max_height": 3000, "max_width": 3000}}, "must be a dict of whole numbers"),
        ({"size": "large"}, "must be a dict of whole numbers"),
        ({"size": {1: 2, "a": 3}}, "must be a dict of whole numbers"),
        ({"size": {"height": 0, "width": 0}}, "more than max_image_pixels=50,000,000, or none"),
        ({"image_mean": "x"}, "image_mean='x' must be a number, or one for each channel"),
        ({"image_mean": [[1.0]]}, "image_mean=.* must be a number, or one for each channel"),
        ({"image_mean": [0.1, 0.2]}, "image_mean=.* must be a number, or one for each channel"),
        ({"image_mean": [0.1, 0.2, True]}, "image_mean=.* must be a number, or one for each channel"),
        ({"image_mean": None}, "image_mean=None must be a number, or one for each channel"),
        ({"image_std": [1e-30] * 3}, r"image_std=\[1e-30, .* would make values above 4096 of pixels"),
        ({"image_std": 0}, "image_std=0 would make values above 4096"),
        ({"image_std": [0.5, 0.5, -0.0]}, "image_std=.* would make values above 4096"),
        ({"image_std": float("inf")}, "image_std=inf must be a number"),
        ({"image_mean": -1e9}, "image_mean=-1000000000.0 would make values above 4096"),
        ({"rescale_factor": 1e308}, r"rescale_factor=1e\+308 must be a number"),
        ({"rescale_factor": 100}, "rescale_factor=100 would make values above 4096"),
        ({"rescale_factor": True}, "rescale_factor=True must be a number"),
        ({"rescale_factor": "1"}, "rescale_factor='1' must be a number"),
        ({"do_rescale": False, "image_std": 0.01}, "image_std=0.01 would make values above 4096"),
        ({"do_resize": "no"}, "do_resize='no' must be true or false"),
        ({"do_normalize": 0}, "do_normalize=0 must be true or false"),
        ({"resample": 10**9}, "resample=1000000000 must be one of Pillow's filters"),
        ({"resample": 1.5}, "resample=1.5 must be one of Pillow's filters"),
        ({"size": {"height": 24.0, "width": 24}}, "must be a dict of whole numbers"),
        ({"size": {"height": True, "width": 24}}, "must be a dict of whole numbers"),
        ({"size": {"shortest_edge": -5}}, "or none"),
        ({"image_grid_pinpoints": [[3360, 3360]]}, "has no setting"),
        ({"temporal_patch_size": 500}, "has no setting"),
        ({"patch_size": 28, "merge_size": 1}, "has no setting"),
        ({"size": 10**400}, "more than max_image_pixels"),
        ({"rescale_factor": float("nan")}, "rescale_factor=nan must be a number"),
        ({"rescale_factor": float("-inf")}, "rescale_factor=-inf must be a number"),
        (["size"], "must be a dict, not list|must be of type Mapping"),
    ],
)
def test_settings_that_are_refused(llm, path, settings, message):
    with pytest.raises(RequestError, match=message):
        ask(llm, one(A, mm_processor_kwargs=settings))
    with pytest.raises(QuireError, match=message):
        open_llm(path, mm_processor_kwargs=settings)


def test_settings_that_do_not_fit_the_tower_fail_the_request(llm, kind):
    small = {"crop_size": {"height": 12, "width": 12}}
    settings = {"do_resize": False} if kind.name == "qwen" else small  # 24 x 23 are no groups of its patches
    failed, good = ask(llm, [one(A, mm_processor_kwargs=settings), one(A)])
    assert error_of(failed) and good.outputs[0].token_ids == tokens(llm, one(A))[0]


def test_threads_that_share_a_processor_find_what_one_finds(llm, kind):
    processor, config = llm.llm_engine.media.preprocessor.processor, llm.llm_engine.config.media
    settings = [processor.settings(one) for one in (None, *VALID[kind.name])]
    sizes = [(30, 100), (100, 30), (24, 24), (53, 47)]
    jobs = [(load_picture(picture(seed, size), config), one) for seed, size in enumerate(sizes) for one in settings] * 4
    expected = [processor(*job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda job: processor(*job), jobs))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_prompts_that_images_make_too_long(path):
    llm = open_llm(path, max_model_len=40)
    told = error_of(ask(llm, prompt([5] + [IMAGE, 6] * 7, [A] * 7))[0])
    assert "maximum context length is 40 tokens. However, your prompt resulted in at least" in told
    assert "max_model_len leaves room for 32" in told
    small = open_llm(path, num_gpu_blocks_override=5, block_size=8)
    assert "by the KV pool of 40 tokens" in error_of(ask(small, prompt([5] + [IMAGE, 6] * 7, [A] * 7))[0])
    for each in (llm, small):
        nothing_left(each)
