"""Sounds in prompts: their forms, limits and uuids, promise 1, and that nobody hears another's."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, RequestError, SamplingParams
from quire.errors import QuireError
from tests.multimodal.open_engine import (
    all_ready,
    ask,
    drive,
    error_of,
    greedy,
    nothing_left,
    open_llm,
    room_for,
    tokens,
)
from tests.multimodal.tiny_audio import ARCHITECTURE, AUDIO, CASES, asked, build, encoded, one, sound, wav

STEPS = 6
SECONDS = [0.05, 0.3, 0.77, 1.0, 0.5]
# The numbers of each request's sounds: none, some, the same one again (also with another between), some next to others.
REQUESTS = [[], [0], [0], [1, 2], [0, 3, 0], [], [4, 0], [2], [1, 1, 3]]
MOST = 25  # features of one of them


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(ARCHITECTURE, "plain", tmp_path_factory.mktemp("audio")))


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return open_llm(path)


def requests(rate: int) -> list[tuple[dict[str, Any], SamplingParams]]:
    rng = random.Random(2)
    sounds = [(sound(number, seconds, 16_000), 16_000) for number, seconds in enumerate(SECONDS)]
    sounds[3] = sound(3, 0.5, rate), rate
    shared = [rng.randrange(3, 300) for _ in range(9)]
    made = []
    for number, chosen in enumerate(REQUESTS):
        ids = list(shared[: rng.choice([2, 9])])
        for _ in chosen:
            ids += [AUDIO, *(rng.randrange(3, 300) for _ in range(rng.choice([0, 4])))]
        ids += [rng.randrange(3, 300) for _ in range(rng.choice([1, 6]))]
        kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"n": 2}]
        more: dict[str, Any] = {"prompt_logprobs": 1} if number in (0, 3, 4) else {}
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=3, seed=number, **kinds[number % 3], **more)
        made.append((asked(ids, [sounds[place] for place in chosen]), params))
    return made


def answers(llm: LLM, chosen: list[tuple[dict[str, Any], SamplingParams]]) -> list[tuple[Any, Any]]:
    outputs = ask(llm, [prompt for prompt, _ in chosen], [params for _, params in chosen])
    nothing_left(llm)
    assert all(len(completion.token_ids) == STEPS for output in outputs for completion in output.outputs)
    return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", CASES)
def test_a_request_answers_as_if_it_were_alone(variant: str, dtype: str, tmp_path: Path) -> None:
    """Bit by bit: in company, in chunks that cut sounds, from the prefix cache, with little room, and preempted."""
    path = str(build(ARCHITECTURE, variant, tmp_path))
    calm = open_llm(path, dtype=dtype, enable_prefix_caching=False)
    rate = calm.llm_engine.media.preprocessor._others["audio"]._processor.rate  # no door has it
    given = requests(rate)
    alone = [answers(calm, [each])[0] for each in given]
    for budget, more in ((5, {}), (11, {"enable_prefix_caching": False}), (2048, {"enforce_eager": True})):
        crowd = open_llm(path, dtype=dtype, max_num_batched_tokens=budget, **more)
        assert answers(crowd, given) == alone
        assert answers(crowd, given[::-1]) == alone[::-1]
        features = crowd.llm_engine.scheduler.encoder.features
        assert features.misses == len(SECONDS) == len(features) and features.hits > 0
    tight = open_llm(
        path, dtype=dtype, max_num_batched_tokens=23, block_size=4,
        media_cache_bytes=room_for(MOST, 4 if dtype == "float32" else 2), num_gpu_blocks_override=24,
    )  # fmt: skip
    for _ in range(20):  # sounds that come late may find the pool free
        for number, (prompt, params) in enumerate(given * 3):
            tight.llm_engine.add_request(str(number), prompt, params)
        done = drive(tight.llm_engine)
        found = [done[str(number)] for number in range(3 * len(given))]
        assert [
            ([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in found
        ] == alone * 3
        nothing_left(tight)
        if tight.llm_engine.scheduler.num_preemptions:
            break
    if variant != "windows":  # which gives back what is behind its window
        assert tight.llm_engine.scheduler.num_preemptions > 0
    # The sounds are heard: another one gives other scores.
    prompt, params = given[1]
    other = {**prompt, "multi_modal_data": {"audio": [(sound(9, SECONDS[0]), 16_000)]}}
    first, second = (ask(calm, [each], [params])[0].outputs[0].logprobs for each in (prompt, other))
    assert first != second


def test_threads_do_not_matter(path: str, llm: LLM) -> None:
    given = requests(16_000)
    few = answers(llm, given)
    torch.set_num_threads(3)
    try:
        assert answers(open_llm(path), given) == few
    finally:
        torch.set_num_threads(1)


def test_beams_over_sounds(path: str, llm: LLM) -> None:
    given = [prompt for prompt, _ in requests(16_000)[:5]]
    params = BeamSearchParams(beam_width=3, max_tokens=STEPS, ignore_eos=True)
    fresh = [open_llm(path, enable_prefix_caching=False).beam_search(each, params)[0] for each in given]
    tight = open_llm(path, max_num_batched_tokens=23, block_size=4, num_gpu_blocks_override=36)
    assert [output.sequences for output in tight.beam_search(given, params)] == [o.sequences for o in fresh]
    nothing_left(tight)


def test_nobody_hears_anothers(path: str) -> None:
    """Prompts of one text and one length, each with a sound of its own, at once, twice, and in any order."""
    sounds = [sound(number, 0.6) for number in range(10)]
    calm = open_llm(path, enable_prefix_caching=False)
    alone = [tokens(calm, one(each))[0] for each in sounds]
    scored = [ask(calm, [one(each)], [greedy(1, logprobs=1)])[0].outputs[0].cumulative_logprob for each in sounds]
    assert len(set(scored)) == len(sounds)
    llm = open_llm(path, max_num_batched_tokens=13, block_size=4)
    for seed in range(3):
        order = random.Random(seed).sample(range(10), 10)
        assert tokens(llm, *(one(sounds[number]) for number in order)) == [alone[number] for number in order]
    nothing_left(llm)
    # Two sounds in one prompt are not one another's either.
    both = [tokens(calm, asked([5, AUDIO, 6, AUDIO, 7], [sounds[a], sounds[b]]))[0] for a, b in ((0, 1), (1, 0))]
    assert both[0] != both[1]
    # Of one digest are only those that are heard as one: a longer pause is another sound, and so is another rate.
    longer = np.concatenate([sounds[0], np.zeros(1, np.float32)])
    others = [one(each) for each in (sounds[0], longer, (sounds[0], 8_000))]
    features = calm.llm_engine.scheduler.encoder.features
    before = features.misses
    tokens(calm, *others)
    assert features.misses == before + 2


def test_one_sound_in_all_its_forms_gives_one_answer(llm: LLM, path: str, tmp_path: Path) -> None:
    """Samples, WAV, a file, a path, a URL: the same samples, the same tokens, encoded once."""
    pytest.importorskip("av")
    samples = np.round(sound(4, 0.5) * 32_768).astype(np.float32) / 32_768
    data = wav(samples)
    (tmp_path / "a.wav").write_bytes(data)
    own = open_llm(path, allowed_local_media_path=str(tmp_path))
    forms = [
        samples, samples.tolist(), torch.from_numpy(samples), (samples, 16_000), data, bytearray(data),
        wav(samples, bits=16, floats=False), encoded(samples), tmp_path / "a.wav", str(tmp_path / "a.wav"),
        f"file://{tmp_path}/a.wav", np.stack([samples, samples]),
    ]  # fmt: skip
    found = tokens(own, *(one(form) for form in forms))
    assert found == [found[0]] * len(forms) == tokens(llm, *(one(form) for form in forms[:1])) * len(forms)
    assert own.llm_engine.scheduler.encoder.features.misses == 1
    single = {"prompt_token_ids": [5, 6, AUDIO, 7, 8]}
    for given in (samples, samples.tolist(), (samples, 16_000), data):
        assert tokens(own, {**single, "multi_modal_data": {"audio": given}}) == found[:1]
    nothing_left(own)


@cache
def clips() -> list[np.ndarray]:
    return [sound(1, 0.4), sound(2, 0.4)]


def test_a_sound_comes_again_by_its_uuid(llm: LLM) -> None:
    first, second = (tokens(llm, one(each))[0] for each in clips())
    named = {"multi_modal_uuids": {"audio": ["a"]}}
    assert tokens(llm, one(clips()[0], **named)) == [first]
    assert tokens(llm, one(None, **named)) == [first]
    assert tokens(llm, {**one(None), "multi_modal_data": {}, "multi_modal_uuids": {"audio": "a"}}) == [first]
    assert tokens(llm, one((clips()[1], 16_000), **named)) == [second]  # other contents take its place
    assert tokens(llm, {**one(0), "multi_modal_data": {"audio": (clips()[1], 16_000)}, **named}) == [second]
    assert tokens(llm, one(None, **named)) == [second]
    with pytest.raises(RequestError, match="audio 0: nothing is known of the uuid 'b'"):
        ask(llm, one(None, multi_modal_uuids={"audio": ["b"]}))
    with pytest.raises(RequestError, match="nothing is known of the uuid 'a'"):
        ask(llm, one(None, cache_salt="other", **named))


def test_limits_are_told_with_their_way_out(path: str) -> None:
    llm = open_llm(
        path, limit_mm_per_prompt={"audio": 2}, max_audio_bytes=30_000, max_audio_duration=1.5, max_model_len=60
    )
    clip = clips()[0]
    for given, message in (
        (asked([AUDIO] * 3, [clip] * 3), r"has 3 of audio, and 2 are allowed: .* limit_mm_per_prompt"),
        (asked([5, AUDIO], [clip] * 2), "1 audio marker and 2 audios"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": [b"x"]}}, "has 'image', and this model takes audio"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"video": [b"x"]}}, "has 'video', and this model takes audio"),
        (
            {**one(clip), "mm_processor_kwargs": {"sampling_rate": 3}},
            "has no setting 'sampling_rate'; it has truncation",
        ),
        ({**one(clip), "mm_processor_kwargs": {"truncation": 1}}, "truncation=1 must be true or false"),
    ):
        with pytest.raises(RequestError, match=message):
            ask(llm, given)
    for sounds, message in (
        ([bytes(30_001)], "more than the 30,000 bytes that are allowed: .* max_audio_bytes"),
        ([np.zeros(24_001, np.float32)], "it lasts 2 s, and 1.5 s are allowed: .* max_audio_duration"),
        ([sound(1, 1.4), sound(2, 1.4)], "audio 1.* takes|max_model_len|maximum"),
        ([np.zeros(300, np.float32)], "audio 0: it is too short: this model hears 3 frames"),
    ):
        (output, usual) = ask(llm, [asked([5] + [AUDIO] * len(sounds), sounds), one(clip)])
        assert re.search(message, error_of(output)), error_of(output)
        assert usual.outputs[0].finish_reason == "length"
    nothing_left(llm)


def test_what_is_longer_than_the_model_hears(llm: LLM) -> None:
    """Two seconds here. Its beginning alone is taken where somebody asks for that."""
    long = sound(3, 2.5)
    assert "it lasts 2.50 s, and this model hears 2 s: cut it" in error_of(ask(llm, one(long))[0])
    begun = tokens(llm, one(long[:32_000]))
    assert tokens(llm, one(long, mm_processor_kwargs={"truncation": True})) == begun
    assert tokens(llm, one(wav(long), mm_processor_kwargs={"audio_kwargs": {"truncation": True}})) == begun
    nothing_left(llm)


def test_a_conversation_with_sounds(llm: LLM, path: str) -> None:
    template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'audio' %}<|AUDIO|>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    own = LLM(path, num_gpu_blocks_override=200, debug=True)
    data = base64.b64encode(wav(clips()[0])).decode()
    parts: list[dict[str, Any]] = [
        {"type": "audio", "audio": clips()[0]},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/x-wav;base64,{data}"}, "uuid": "u"},
        {"type": "audio_url", "uuid": "u"},
    ]
    asked_for = [
        own.chat([{"role": "user", "content": [{"type": "text", "text": "ab"}, part]}], greedy(), use_tqdm=False,
                 chat_template=template)[0] for part in parts
    ]  # fmt: skip
    prompt = {"prompt": "ab<|AUDIO|>", "multi_modal_data": {"audio": clips()[0]}}
    (plain,) = own.generate(prompt, greedy(), use_tqdm=False)
    for output in asked_for:
        assert output.prompt_token_ids == plain.prompt_token_ids
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_aborted_while_it_is_prepared(path: str) -> None:
    llm = open_llm(path)
    engine = llm.llm_engine
    for number in range(4):
        engine.add_request(str(number), one(wav(sound(number, 1.5))), greedy())
    engine.abort_request(["0", "1", "3"])
    all_ready(engine)
    assert list(drive(engine)) == ["2"]
    nothing_left(llm)


def test_a_config_that_contradicts_itself(path: str, tmp_path: Path) -> None:
    for name, edit, message in (
        ("processor_config.json", {"feature_extractor": {"dither": 0.1}}, "dither=0.1: random numbers"),
        ("processor_config.json", {"feature_extractor": {"feature_size": 21}}, "makes 21 x 200 of a sound"),
        ("config.json", {"audio_token_index": -1}, "audio_token_id"),
        ("config.json", {"audio_config": {"encoder_attention_heads": 5}}, "it must divide d_model"),
        ("config.json", {"audio_config": {"d_model": 0}}, "d_model"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(path, folder)
        if not (folder / name).exists():
            name, edit = "preprocessor_config.json", edit["feature_extractor"]
        raw = json.loads((folder / name).read_text())
        for field, value in edit.items():
            raw[field] = {**raw[field], **value} if isinstance(value, dict) else value
        (folder / name).write_text(json.dumps(raw))
        with pytest.raises(QuireError, match=message):
            LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=50)
