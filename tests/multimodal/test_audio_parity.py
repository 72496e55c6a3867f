"""Models that hear against transformers: features, placeholders and greedy tokens.

As in test_vision_parity.py: requests with none to three sounds each run together; the token budget cuts sounds in two,
the prefix cache is on, and the pool is so small that some are preempted. Transformers runs each alone, in float64.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM
from quire.models.loader import load_model
from quire.multimodal import AudioProcessor
from tests.multimodal.families import HEARING
from tests.multimodal.open_engine import all_ready, drive, greedy
from tests.multimodal.test_vision_parity import renamed
from tests.multimodal.tiny_audio import ARCHITECTURE, AUDIO, CASES, Oracle, asked, build, sound
from tests.multimodal.tiny_vision import make

STEPS = 32
REQUESTS = 10
SECONDS = [0.05, 0.31, 0.5, 0.77, 1.0]


def prompts(rate: int, seed: int = 5) -> list[tuple[list[int], list[np.ndarray]]]:
    """(ids with a marker for each sound, sounds); several begin alike, and some sounds come again elsewhere."""
    rng = random.Random(seed)
    shared, first = [rng.randrange(3, 300) for _ in range(14)], sound(0, 0.4, rate)
    made = []
    for number in range(REQUESTS):
        ids, sounds = list(shared[: rng.choice([3, 9, 14])]), []
        for place in range(number % 4):
            sounds.append(first if place == 0 and number % 2 else sound(rng.randrange(9), rng.choice(SECONDS), rate))
            ids += [AUDIO, *(rng.randrange(3, 300) for _ in range(rng.randint(1, 6)))]
        made.append((ids + [rng.randrange(3, 300) for _ in range(rng.randint(0, 9))], sounds))
    return made


@pytest.mark.parametrize("variant", CASES)
def test_features(variant: str, tmp_path: Path) -> None:
    """Of clips of all lengths, from the shortest to the longest, to a sample."""
    oracle = Oracle(variant)
    path = build(ARCHITECTURE, variant, tmp_path, oracle.model)
    model: Any = load_model(path)
    processor, hop = AudioProcessor(path), oracle.extractor.hop_length
    model.check_audio_processor(processor.known)
    assert processor.rate == oracle.rate
    longest = processor.longest
    for number, samples in enumerate([2 * hop + 1, 3 * hop, 3 * hop + 1, 5 * hop, 2777, 7999, longest - 1, longest]):
        clip = sound(number, 1.0 + longest / oracle.rate, oracle.rate)[:samples]
        inputs = processor(clip)
        theirs = oracle.inputs([clip])
        assert all(torch.equal(inputs[name], theirs[name]) for name in theirs)
        with torch.inference_mode():
            ours = model.encode_audio(inputs)
        expected = oracle.features(clip)
        assert ours.shape == expected.shape == (model.audio_layout(inputs).tokens, 32)
        assert (ours - expected).abs().max() < 1e-4
        assert expected.std() > 0.1  # or equal would mean nothing
    for samples in (1, 2 * hop):
        with pytest.raises(ValueError, match="too short: this model hears 3 frames"):
            model.audio_layout(processor(clip[:samples]))


@pytest.mark.parametrize("variant", CASES)
def test_greedy_tokens(variant: str, tmp_path: Path) -> None:
    oracle = Oracle(variant)
    path = build(ARCHITECTURE, variant, tmp_path, oracle.model)
    batch = prompts(oracle.rate)
    blocks = max(-(-(len(oracle.answer(ids, sounds, 1)[0]) + STEPS) // 4) for ids, sounds in batch) * 5 // 2
    blocks = HEARING[ARCHITECTURE].blocks.get(variant, blocks)  # those behind its window are given back
    llm = LLM(str(path), max_num_batched_tokens=17, block_size=4, num_gpu_blocks_override=blocks, debug=True)
    engine = llm.llm_engine
    for number, (ids, sounds) in enumerate(batch):
        engine.add_request(str(number), asked(ids, sounds), greedy(STEPS))
    all_ready(engine)  # or those that come late would need no room beside the others
    finished = drive(engine)
    outputs = [finished[str(number)] for number in range(REQUESTS)]
    assert engine.scheduler.num_preemptions > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert engine.pool.num_owned == 0
    engine.check_integrity()
    for (ids, sounds), output in zip(batch, outputs, strict=True):
        expanded, answer = oracle.answer(ids, sounds, STEPS)
        assert output.prompt_token_ids == expanded
        assert output.outputs[0].token_ids == answer


@pytest.mark.parametrize("naming", ["since 4.52", "before 4.52"])
def test_both_namings_load(naming: str, tmp_path: Path) -> None:
    theirs = make(ARCHITECTURE, "plain")
    plain = load_model(build(ARCHITECTURE, "plain", tmp_path / "plain", theirs))
    path = build(ARCHITECTURE, "plain", tmp_path / "named", theirs)
    save_file({renamed(k, naming): v.contiguous() for k, v in theirs.state_dict().items()}, path / "model.safetensors")
    named = load_model(path)
    for (name, one), (other_name, other) in zip(plain.named_parameters(), named.named_parameters(), strict=True):
        assert name == other_name and torch.equal(one, other)


def test_the_processor_of_transformers_writes_the_same_prompt(tmp_path: Path) -> None:
    """Text in, as its users have it: through transformers' own processor, and through quire."""
    import transformers

    oracle = Oracle("plain")
    path = build(ARCHITECTURE, "plain", tmp_path, oracle.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    processor = transformers.Qwen2AudioProcessor(oracle.extractor, tokenizer)
    text, sounds = "a <|AUDIO|> b <|AUDIO|>c", [sound(1, 0.3), sound(2, 1.7)]
    theirs = processor(text=text, audio=sounds, sampling_rate=oracle.rate, return_tensors="pt")
    (output,) = LLM(str(path), num_gpu_blocks_override=200).generate(
        {"prompt": text, "multi_modal_data": {"audio": sounds}}, greedy(STEPS), use_tqdm=False
    )
    assert output.prompt_token_ids == theirs["input_ids"][0].tolist()
    with torch.inference_mode():
        wide = {**theirs, "input_features": theirs["input_features"].double()}
        out = oracle.model.double().generate(
            **wide, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert output.outputs[0].token_ids == out[0, len(output.prompt_token_ids) :].tolist()
