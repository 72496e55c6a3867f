"""Models that see, of which the text model is quantized at load: transformers' and PEFT's answers on the numbers of its
rows, with images and adapters; and promise 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

from quire import LLM, LoRARequest
from quire.checkpoint.files import SINGLE
from quire.layers import Embedding, Linear
from quire.models.loader import load_model
from tests.lora.peft_world import ask, vision_prompts
from tests.lora.quantized_world import QuantizedExpected, QuantizedWorld, RoundedLinear
from tests.multimodal import tiny_vision

MODELS = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "mrope"),
    "llava": ("LlavaForConditionalGeneration", "clip"),
    "smolvlm": ("SmolVLMForConditionalGeneration", "squares"),
    "gemma3": ("Gemma3ForConditionalGeneration", "windows"),
}
ATTENTION = r"^(?!.*(vision|visual)).*\.(q_proj|v_proj|o_proj|gate_proj|up_proj)$"
SETTINGS: dict[str, Any] = {"enable_lora": True, "block_size": 4, "num_gpu_blocks_override": 1024}
Worlds = Callable[[str, str], QuantizedWorld]


def with_numbers_of_the_rows(path: Path, quantization: str, to: Path, architecture: str) -> Any:
    """transformers' model of the numbers that a checkpoint's layers have with `quantization`."""
    model = load_model(path, "float32", quantized=quantization)
    assert model.quantization is not None
    tensors = load_file(path / SINGLE)
    made = set()
    for place, own in model.quantization.layers.items():
        layer = model.get_submodule(place)
        assert not model.is_visual(place) and isinstance(layer, (Linear, Embedding))
        if own.rows is None:
            continue  # tied to another
        (name,) = own.rows.shapes
        is_table = isinstance(layer, Embedding)
        numbers = layer.rows(0, layer.num_embeddings) if is_table else layer.format.rows(layer, 0, layer.out_features)
        assert numbers.shape == tensors[name].shape and not torch.equal(numbers, tensors[name])
        tensors[name] = numbers.contiguous()
        made.add(numbers.numpy().tobytes())
    assert len(made) > 8
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(tensors, to / SINGLE, {"format": "pt"})
    kind = getattr(transformers, tiny_vision.FAMILIES[architecture].architecture or architecture)
    theirs = kind.from_pretrained(to, dtype=torch.float32, attn_implementation="eager")
    for module in theirs.modules():
        if isinstance(module, nn.Linear) and module.weight.detach().numpy().tobytes() in made:
            module.__class__ = RoundedLinear
    theirs.name_or_path = theirs.config._name_or_path = str(to)
    return theirs.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """(a name of MODELS, `quantization`) -> the world of that model."""
    known: dict[tuple[str, str], QuantizedWorld] = {}

    def get(name: str, quantization: str) -> QuantizedWorld:
        if (name, quantization) not in known:
            architecture, variant = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            (folder / "numbers").mkdir()
            path = tiny_vision.build(architecture, variant, folder / "base")
            theirs = with_numbers_of_the_rows(path, quantization, folder / "numbers", architecture)
            prompts, processor = vision_prompts(architecture), tiny_vision.image_processor(architecture, variant)
            llm = LLM(str(path), quantization=quantization, **SETTINGS)
            outputs = ask(llm, prompts, None)
            plain = [output.outputs[0].token_ids for output in outputs]
            family = tiny_vision.FAMILIES[architecture]
            world = QuantizedWorld(theirs, path, llm, prompts, processor, plain, folder, family)
            world.check(outputs, QuantizedExpected(world, None))
            known[name, quantization] = world
        return known[name, quantization]

    yield get
    for world in known.values():
        world.llm.llm_engine.check_integrity()


CASES = [pytest.param(name, kind, marks=pytest.mark.slow if kind == "int4" and name != "qwen2_vl" else ())
         for name in MODELS for kind in ("int8", "int4")]  # fmt: skip


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_answers_with_images_and_adapters(made: Worlds, name: str, quantization: str) -> None:
    """The world holds its own answers against transformers' when it is made."""
    world = made(name, quantization)
    config = LoraConfig(r=4, target_modules=ATTENTION)
    assert world.agree(world.train(config))


@pytest.mark.parametrize("name", MODELS)
def test_images_and_company_change_nobodys_bits(made: Worlds, name: str) -> None:
    world = made(name, "int8")
    adapter = world.train(LoraConfig(r=4, target_modules=ATTENTION))
    requests = [*((one, None) for one in world.prompts), *((one, LoRARequest("a")) for one in world.prompts)]

    def answers(llm: LLM, chosen: list[int]) -> list[Any]:
        own = [requests[i] for i in chosen]
        outputs = ask(llm, [prompt for prompt, _ in own], [adapter for _, adapter in own])
        llm.llm_engine.check_integrity()
        return [(one.outputs[0].token_ids, one.prompt_logprobs) for one in outputs]

    def opened(**settings: Any) -> LLM:
        llm = LLM(str(world.path), quantization="int8", **{**SETTINGS, **settings})
        llm.load_lora_adapter("a", str(adapter))
        return llm

    llm = opened(enable_prefix_caching=False)
    alone = [answers(llm, [i])[0] for i in range(6)]
    assert len({repr(one) for one in alone}) == 6
    for settings in ({"max_num_batched_tokens": 11}, {"num_gpu_blocks_override": 48}):
        llm = opened(**settings)
        assert answers(llm, list(range(6))) == alone
    llm.sleep()
    llm.wake_up()
    assert answers(llm, list(range(6))) == alone
