"""Adapters of a vision tower: each request sees its own features, whatever is reloaded, aborted or fails meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest
from tests.lora import adapter_files as files
from tests.lora.adapter_files import (
    ask,
    drive,
    error_of,
    greedy,
    no_adapters,
    nothing_left,
    open_llm,
    prompt,
    result,
    tokens,
)
from tests.multimodal import tiny_vision
from tests.multimodal.open_engine import all_ready, held_back


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build("LlavaForConditionalGeneration", "clip", tmp_path_factory.mktemp("llava"))


def tower_adapter(llm: LLM, folder: Path, seed: int) -> Path:
    """LoRA on every q_proj, in the tower and in the text model."""
    engine = llm.llm_engine
    naming, generator = engine.adapters._reader._namings[0], torch.Generator().manual_seed(seed)
    made = {}
    for name, own in naming.modules.items():
        if name.endswith("q_proj"):
            out, inner = engine.executor.runner.model.get_submodule(own).weight.shape
            made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(3, inner, generator=generator)
            made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 3, generator=generator)
    assert sum("vision" in name for name in made) >= 2
    return files.write(folder, files.config(3) | {"target_modules": ["q_proj"]}, made)


def seen(seed: int = 0) -> dict[str, Any]:
    ids = [5, 6, tiny_vision.IMAGE, *prompt(seed, 6)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [tiny_vision.picture(0, (30, 40))]}}


def test_an_adapter_on_the_tower_reloaded_while_running(llava, tmp_path):
    """One image has features for the base model and for each version, and each request sees its own."""
    llm = open_llm(llava, block_size=4)
    engine = llm.llm_engine
    first, second = tower_adapter(llm, tmp_path / "1", 1), tower_adapter(llm, tmp_path / "2", 2)
    alone = []
    for folder in (None, first, second):
        fresh = open_llm(llava, enable_prefix_caching=False)
        if folder is not None:
            fresh.load_lora_adapter("x", str(folder))
        alone.append(tokens(fresh, [seen()], None if folder is None else "x", greedy(10))[0])
    assert len({tuple(one) for one in alone}) == 3

    outputs = {}
    llm.load_lora_adapter("x", str(first))
    for number, folder in enumerate((first, second, first)):
        if number:
            llm.load_lora_adapter("x", str(folder), load_inplace=True)
        engine.add_request(f"base{number}", seen(), greedy(10))
        engine.add_request(f"x{number}", seen(), greedy(10), LoRARequest("x"))
        all_ready(engine)
        outputs.update((output.request_id, output) for output in engine.step())
    outputs.update(drive(engine))
    wanted = {"base0": 0, "base1": 0, "base2": 0, "x0": 1, "x1": 2, "x2": 1}
    assert {name: result(outputs[name]) for name in wanted} == {name: alone[place] for name, place in wanted.items()}
    assert len(engine.scheduler.encoder.features) == 3 == engine.scheduler.encoder.features.misses
    nothing_left(llm)
    llm.unload_lora_adapter("x")
    no_adapters(llm)


def test_aborted_while_their_images_are_prepared(llava, tmp_path):
    llm = open_llm(llava)
    engine = llm.llm_engine
    llm.load_lora_adapter("x", str(tower_adapter(llm, tmp_path, 1)))
    with held_back(llm):
        for number in range(4):
            engine.add_request(str(number), seen(number), greedy(), LoRARequest("x"))
        assert llm.list_lora_adapters()[0].requests == 4
        engine.check_integrity()
        unloading = engine.unload_lora_adapter("x")
        engine.abort_request(["0", "1", "2"])
        engine.check_integrity()
        assert engine.freed_bytes(unloading) is None
        engine.abort_request("3")
        assert engine.freed_bytes(unloading) > 0
    no_adapters(llm)


def test_a_bad_image_gives_its_adapter_back(llava, tmp_path):
    llm = open_llm(llava)
    llm.load_lora_adapter("x", str(tower_adapter(llm, tmp_path, 1)))
    bad = {"prompt_token_ids": [5, tiny_vision.IMAGE], "multi_modal_data": {"image": [b"no picture"]}}
    outputs = ask(llm, [bad, seen()], "x")
    assert "image 0" in error_of(outputs[0]) and len(result(outputs[1])) == 6
    nothing_left(llm)
    llm.unload_lora_adapter("x")
    no_adapters(llm)


def _raise(*_: Any) -> Any:
    raise RuntimeError("a fault of the model")


def test_a_fault_in_a_tower_puts_its_parameters_back(llava, tmp_path, monkeypatch):
    """LoRA on the convolution exchanges a parameter while an image is encoded."""
    llm = open_llm(llava)
    engine = llm.llm_engine
    naming, model = engine.adapters._reader._namings[0], engine.executor.runner.model
    (name,) = [one for one in naming.modules if one.endswith("patch_embedding")]
    conv = model.get_submodule(naming.modules[name])
    shape = conv.weight.shape
    made = {
        f"{name}.lora_A.weight": torch.randn(2, *shape[1:]),
        f"{name}.lora_B.weight": torch.randn(shape[0], 2, 1, 1),
    }
    files.write(tmp_path, files.config(2) | {"target_modules": ["patch_embedding"]}, made)
    llm.load_lora_adapter("x", str(tmp_path))
    plain, own = tokens(llm, [seen()]), conv.weight
    changed = tokens(llm, [seen()], "x")
    assert changed != plain and conv.weight is own
    with monkeypatch.context() as patch:
        patch.setattr(conv, "forward", _raise)
        (output,) = ask(llm, [{**seen(), "multi_modal_data": {"image": [tiny_vision.picture(9, (30, 40))]}}], "x")
        assert "of the model" in error_of(output)
    assert conv.weight is own and engine.executor.runner.adapter_slots._context.segments is None
    assert tokens(llm, [seen()]) == plain and tokens(llm, [seen()], "x") == changed
    nothing_left(llm)
