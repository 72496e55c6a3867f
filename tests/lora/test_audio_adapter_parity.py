"""Adapters of a model that hears, on its tower, its projector and its text model, against PEFT; all in one batch."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from quire import LLM, LoRARequest
from tests.lora.peft_world import randomise
from tests.multimodal.open_engine import ask, greedy, nothing_left, open_llm
from tests.multimodal.tiny_audio import ARCHITECTURE, AUDIO, Oracle, asked, build, sound

STEPS = 32
# What each adapter changes, and whether a sound's features are others then.
ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "tower": ({"target_modules": r".*audio_tower.*\.(q_proj|v_proj|out_proj|fc1|fc2)"}, True),
    "convolutions": ({"target_modules": ["conv1", "conv2"], "r": 3}, True),
    "projector": ({"target_modules": r".*multi_modal_projector\.linear", "use_rslora": True}, True),
    "text": ({"target_modules": r".*language_model.*\.(q_proj|down_proj)", "use_dora": True}, False),
    "all": ({"target_modules": ["q_proj", "k_proj", "fc2", "linear", "up_proj"]}, True),
}
PROMPTS = [
    ([5, 6, AUDIO, 7, 8], [sound(1, 0.5)]),
    ([9, AUDIO, 10, AUDIO, 11], [sound(2, 0.3), sound(1, 0.5)]),
    ([12, 13, 14], []),
]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("plain")


@pytest.fixture(scope="module")
def path(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ARCHITECTURE, "plain", tmp_path_factory.mktemp("audio"), oracle.model)


@pytest.fixture(scope="module")
def folders(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random adapters, saved by PEFT."""
    base, made = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, (settings, _)) in enumerate(ADAPTERS.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(oracle.model), LoraConfig(**{"r": 4, **settings}))
            randomise(model, seed)
            model.create_or_update_model_card = lambda folder: None
            model.save_pretrained(base / name)
        made[name] = base / name
    return made


def adapted(oracle: Oracle, folder: Path) -> Oracle:
    other = copy.copy(oracle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(oracle.model), folder).eval()
    # transformers asks its convolutions for their stride, which PEFT's stand-ins for them do not have.
    other.model = model.merge_and_unload() if folder.name == "convolutions" else model.base_model.model
    return other


@pytest.fixture(scope="module")
def llm(path: Path, folders: dict[str, Path]) -> LLM:
    llm = open_llm(str(path), enable_lora=True, max_loras=6, max_num_batched_tokens=29, block_size=4)
    for name, folder in folders.items():
        llm.load_lora_adapter(name, str(folder))
    return llm


def test_each_request_is_answered_by_its_own_adapter(oracle: Oracle, llm: LLM, folders: dict[str, Path]) -> None:
    names = [None, *folders]
    asking = [(name, ids, sounds) for ids, sounds in PROMPTS for name in names]
    outputs = llm.generate(
        [asked(ids, sounds) for _, ids, sounds in asking], greedy(STEPS),
        lora_request=[None if name is None else LoRARequest(name) for name, _, _ in asking], use_tqdm=False,
    )  # fmt: skip
    oracles = {None: oracle, **{name: adapted(oracle, folder) for name, folder in folders.items()}}
    for (name, ids, sounds), output in zip(asking, outputs, strict=True):
        expanded, answer = oracles[name].answer(ids, sounds, STEPS)
        assert output.prompt_token_ids == expanded
        assert output.outputs[0].token_ids == answer, name
    nothing_left(llm)


def test_features_of_an_adapter_are_its_own(oracle: Oracle, llm: LLM, folders: dict[str, Path]) -> None:
    """Each is encoded by itself, and once; what no adapter changes is shared with the base model's."""
    clip = sound(7, 0.4)
    features = llm.llm_engine.scheduler.encoder.features
    before = features.misses
    for name in (None, *folders, None, *folders):
        request = None if name is None else LoRARequest(name)
        llm.generate(asked([5, AUDIO, 6], [clip]), greedy(2), lora_request=request, use_tqdm=False)
    assert features.misses - before == 1 + sum(heard for _, heard in ADAPTERS.values())
    theirs = {name: adapted(oracle, folder).features(clip) for name, folder in folders.items()}
    plain = oracle.features(clip)
    for name, (_, heard) in ADAPTERS.items():
        assert bool((theirs[name] - plain).abs().max() > 1e-2) is heard
    assert torch.equal(theirs["text"], plain)
    assert ask(llm, [asked([5, AUDIO, 6], [clip])])[0].outputs[0].finish_reason == "length"
    nothing_left(llm)
