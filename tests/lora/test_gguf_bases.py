"""Adapters of both formats on GGUF files in blocks: PEFT's answers on the model of the blocks' numbers; and no other
bits in any company, after a sleep, or in another process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import AdapterError
from tests.checkpoint import gguf_models
from tests.checkpoint.gguf_quantized import quantized_file
from tests.lora.adapter_files import nothing_left, write
from tests.lora.gguf_adapter_files import tensors_of, write_gguf
from tests.lora.peft_world import ask
from tests.lora.quantized_world import QuantizedExpected, QuantizedWorld, world_of
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ENDS = [*EVERY, "embed_tokens", "lm_head"]
Worlds = Callable[..., QuantizedWorld]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Iterator[Worlds]:
    """(architecture, variant, general.architecture, settings) -> the world of a file of every K-quant."""
    known: dict[str, QuantizedWorld] = {}

    def get(architecture: str, variant: str, arch: str, **settings: Any) -> QuantizedWorld:
        key = repr((architecture, variant, settings))
        if key not in known:
            folder = tmp_path_factory.mktemp(architecture)
            known[key] = world_of(*quantized_file(folder, architecture, variant, arch, **settings), folder)
        return known[key]

    yield get
    for world in known.values():
        world.llm.llm_engine.check_integrity()


@pytest.fixture(scope="module")
def llama(made: Worlds) -> QuantizedWorld:
    return made("LlamaForCausalLM", "gqa", "llama", num_hidden_layers=2)


def as_gguf(folder: Path, alpha: float) -> Path:
    return write_gguf(folder.with_suffix(".gguf"), tensors_of(folder), alpha=alpha)


@pytest.mark.parametrize("rank", [1, 4, 40])
@pytest.mark.parametrize("targets", [EVERY, ["k_proj", "down_proj"]], ids=["every", "two"])
def test_a_file_is_what_peft_says_of_its_folder(llama: QuantizedWorld, rank: int, targets: list[str]) -> None:
    folder = llama.train(LoraConfig(r=rank, lora_alpha=6, target_modules=targets), seed=rank)
    assert llama.agree(as_gguf(folder, 6.0), folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ENDS, "use_dora": True},
        {"target_modules": ENDS, "use_rslora": True, "bias": "none"},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]},
        {"target_modules": EVERY, "trainable_token_indices": {"embed_tokens": [3, 50, 7]}},
    ],
    ids=str,
)
def test_pefts_folders(llama: QuantizedWorld, fields: dict[str, Any]) -> None:
    assert llama.agree(llama.train(LoraConfig(r=4, **fields)))


@pytest.mark.parametrize(
    ("architecture", "variant", "arch", "targets"),
    [
        ("Qwen2ForCausalLM", "gqa", "qwen2", EVERY),
        ("Phi3ForCausalLM", "window", "phi3", ["qkv_proj", "gate_up_proj", "down_proj"]),
        ("MixtralForCausalLM", "as_published", "llama", ["q_proj", "o_proj"]),
        ("ApertusForCausalLM", "as_published", "apertus", ["q_proj", "k_proj", "up_proj", "down_proj"]),
    ],
)
def test_other_families(made: Worlds, architecture: str, variant: str, arch: str, targets: list[str]) -> None:
    world = made(architecture, variant, arch)
    assert world.agree(world.train(LoraConfig(r=4, target_modules=targets, use_dora=True)))


def test_a_mixture_of_both_formats(llama: QuantizedWorld) -> None:
    folders = [llama.train(LoraConfig(r=rank, target_modules=EVERY), seed=rank) for rank in (2, 5)]
    llama.llm.load_lora_adapter("file", str(as_gguf(folders[0], 8.0)))
    llama.llm.load_lora_adapter("folder", str(folders[1]))
    outputs = ask(llama.llm, llama.prompts, LoRARequest("both", adapters=[("file", 0.7), ("folder", -0.4)]))
    llama.check(outputs, QuantizedExpected(llama, *folders, weights=[0.7, -0.4]))
    for name in ("file", "folder"):
        llama.llm.unload_lora_adapter(name)


def test_weights_that_were_multiplied_take_none(tmp_path: Path) -> None:
    """Of Falcon-H1: neither PEFT's folder nor llama.cpp's file would do there what it was trained to do; nor would the
    file on the model as it was published."""
    model = tiny.make("FalconH1ForCausalLM", "as_published")
    floats = tiny.save(model, tmp_path / "floats")
    path = gguf_models.convert(floats, "falcon-h1", model.config, tmp_path / "model.gguf")
    pair = {"blk.0.attn_q.weight.lora_a": torch.ones(2, 32), "blk.0.attn_q.weight.lora_b": torch.ones(32, 2)}
    file = write_gguf(tmp_path / "adapter.gguf", pair, "falcon-h1")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{start}.lora_A.weight": torch.ones(2, 32), f"{start}.lora_B.weight": torch.ones(32, 2)}
    folder = write(tmp_path / "adapter", fields, tensors)
    llm = LLM(str(path), enable_lora=True, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    for adapter in (file, folder):
        with pytest.raises(AdapterError, match=r"multiplied by numbers that are no longer known.*safetensors"):
            llm.load_lora_adapter("a", str(adapter))
    llm = LLM(str(floats), enable_lora=True, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    assert llm.load_lora_adapter("folder", str(folder)).bytes
    with pytest.raises(AdapterError, match="'falcon-h1' models are served from PEFT's folders alone"):
        llm.load_lora_adapter("file", str(file))


# Promise 1, sleep, and a process of its own

KINDS = [None, LoRARequest("file"), LoRARequest("folder"),
         LoRARequest("both", adapters=[("file", 0.5), ("folder", -0.3)])]  # fmt: skip
REQUESTS = 12
_rng = random.Random(4)
PROMPTS = [[_rng.randrange(3, 97) for _ in range(_rng.randint(1, 30))] for _ in range(REQUESTS)]


@pytest.fixture(scope="module")
def adapters(llama: QuantizedWorld) -> dict[str, Path]:
    folders = [llama.train(LoraConfig(r=rank, target_modules=EVERY), seed=rank) for rank in (3, 6)]
    return {"file": as_gguf(folders[0], 8.0), "folder": folders[1]}


BASES = {
    "gguf": lambda world: {"model": str(world.path)},
    "int8": lambda world: {"model": world.theirs.name_or_path, "quantization": "int8"},
    "int4": lambda world: {"model": world.theirs.name_or_path, "quantization": "int4"},
}


@pytest.fixture(scope="module", params=["gguf", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest, llama: QuantizedWorld) -> dict[str, str]:
    return BASES[request.param](llama)


def opened(base: dict[str, str], adapters: dict[str, Path], **settings: Any) -> LLM:
    llm = LLM(**{**base, "enable_lora": True, "skip_tokenizer_init": True, "num_gpu_blocks_override": 200, **settings})
    for name, path in adapters.items():
        llm.load_lora_adapter(name, str(path))
    return llm


def answers(llm: LLM, chosen: list[int]) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPTS[i]} for i in chosen],
        params,
        lora_request=[KINDS[i % len(KINDS)] for i in chosen],
        use_tqdm=False,
    )
    nothing_left(llm)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


@pytest.fixture(scope="module")
def alone(base: dict[str, str], adapters: dict[str, Path]) -> list[Any]:
    llm = opened(base, adapters, enable_prefix_caching=False)
    found = [answers(llm, [i])[0] for i in range(REQUESTS)]
    assert len({repr(one) for one in found}) == REQUESTS
    return found


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 13}, {"block_size": 4, "num_gpu_blocks_override": 24}],
    ids=["chunks", "preempted"],
)
def test_nobody_changes_anothers_bits(
    base: dict[str, str], adapters: dict[str, Path], alone: list[Any], settings: dict[str, Any]
) -> None:
    llm = opened(base, adapters, **settings)
    assert answers(llm, list(range(REQUESTS))) == alone
    assert bool(llm.llm_engine.scheduler.num_preemptions) == ("block_size" in settings)


@pytest.mark.parametrize(
    ("executor", "level"), [("in_process", 1), ("in_process", 2), pytest.param("process", 2, marks=pytest.mark.slow)]
)
def test_it_wakes_up_as_it_fell_asleep(
    base: dict[str, str], adapters: dict[str, Path], alone: list[Any], executor: str, level: int
) -> None:
    llm = opened(base, adapters, executor=executor)
    everybody = list(range(REQUESTS))
    assert answers(llm, everybody) == alone
    llm.sleep(level)
    assert llm.is_sleeping()
    llm.wake_up()
    assert answers(llm, everybody) == alone
    llm.load_lora_adapter("again", str(adapters["file"]))
    assert llm.unload_lora_adapter("again") > 0
    llm.llm_engine.close()
