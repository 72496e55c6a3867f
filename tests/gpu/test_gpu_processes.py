"""A model that several processes compute on GPUs gives the very bits of one. With fewer GPUs than processes they share
them, and exchange through main memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest
from quire.kernels.exchange import Columns
from quire.kernels.group_exchange import CollectiveExchange, join_gpus, meeting_store
from quire.layers.shards import Shard
from quire.layers.stages import Stage
from quire.models.loader import load_model
from quire.platform.execution.kv_identity import of_all
from tests.kernels.exchange_parties import shared
from tests.lora import adapter_files
from tests.models import rows
from tests.models.tiny import build
from tests.multimodal import test_image_promise as images
from tests.multimodal.tiny_vision import build as build_vision
from tests.platform.conftest import make_llama
from tests.platform.execution.executors import test_pipeline, test_sharded
from tests.platform.execution.executors.test_sharded import WIDE, answers, settings_of

pytestmark = pytest.mark.gpu

ON_GPU = [name for name in test_sharded.CASES if name not in ("states", "transformers' own modules")]
SETTINGS = {
    "int8": {"quantization": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "chunks and preemptions": {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 12},
    "a pool of its own size": {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.2, "max_model_len": 64},
}
SHARED_OUT = {
    "rows": {"tensor_parallel_size": 2},
    "layers": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def compare(path: Path, more: dict[str, Any], **settings: Any) -> None:
    settings = {**settings_of(""), "device": "cuda", **settings}
    expected = answers(LLM(str(path), **settings), 10)
    llm = LLM(str(path), **settings, **more)
    for _ in range(2):  # the second time from the prefix cache
        assert answers(llm, 10) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("name", ON_GPU)
def test_rows(tmp_path: Path, name: str) -> None:
    architecture, variant, sizes, size = test_sharded.CASES[name]
    build(architecture, variant or next(iter(rows.entry(architecture)[2])), tmp_path, **sizes)
    compare(tmp_path, {"tensor_parallel_size": size})


@pytest.mark.parametrize("name", [name for name in test_pipeline.CASES if name != "two by two"])
def test_layers(tmp_path: Path, name: str) -> None:
    architecture, variant, sizes, more = test_pipeline.CASES[name]
    build(architecture, variant or next(iter(rows.entry(architecture)[2])), tmp_path, **sizes)
    compare(tmp_path, {"pipeline_parallel_size": 2, **more})


@pytest.mark.parametrize("shared_out", SHARED_OUT.values(), ids=SHARED_OUT)
@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_settings(tmp_path: Path, more: dict[str, Any], shared_out: dict[str, Any]) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    compare(tmp_path, shared_out, **more)


@pytest.mark.parametrize("shared_out", [{"executor": "process"}, *SHARED_OUT.values()], ids=["one", *SHARED_OUT])
def test_adapters(tmp_path: Path, shared_out: dict[str, Any]) -> None:
    make_llama(tmp_path / "model", torch.bfloat16)  # of the sizes of `adapter_files`
    path = str(tmp_path / "model")
    folders = [str(adapter_files.plain(tmp_path / str(i), seed=i, rank=4 * (i + 1))) for i in range(3)]
    requests = [None, *(LoRARequest(str(i), i + 1, folder) for i, folder in enumerate(folders))]
    mixed = [requests[i % 4] for i in range(12)]
    settings = {"device": "cuda", "enable_lora": True, "num_gpu_blocks_override": 200}

    def with_adapters(llm: LLM) -> list[Any]:
        prompts = [{"prompt_token_ids": [3 + i, 9, 27 + i]} for i in range(len(mixed))]
        outputs = llm.generate(prompts, test_sharded.GREEDY, lora_request=mixed, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = with_adapters(LLM(path, **settings))
    llm = LLM(path, **settings, **shared_out)
    assert with_adapters(llm) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("shared_out", SHARED_OUT.values(), ids=SHARED_OUT)
def test_adapters_of_all_kinds(tmp_path: Path, shared_out: dict[str, Any]) -> None:
    make_llama(tmp_path / "model")
    kinds = ("plain", "dora", "saved", "words", "trained_tokens")
    adapters = [
        LoRARequest(name, i + 1, str(getattr(adapter_files, name)(tmp_path / name))) for i, name in enumerate(kinds)
    ]
    settings = {"device": "cuda", "skip_tokenizer_init": True, "enable_lora": True, "num_gpu_blocks_override": 200}
    prompts = [{"prompt_token_ids": [3 + i, 9, 27 + i]} for i in range(len(kinds))]

    def each(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, test_sharded.GREEDY, lora_request=adapters, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = each(LLM(str(tmp_path / "model"), **settings))
    llm = LLM(str(tmp_path / "model"), **settings, **shared_out)
    assert each(llm) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("shared_out", SHARED_OUT.values(), ids=SHARED_OUT)
def test_images(tmp_path: Path, shared_out: dict[str, Any]) -> None:
    build_vision("LlavaForConditionalGeneration", "clip", tmp_path)
    settings = {
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 60,
    }

    def run(llm: LLM) -> Any:
        prompts, params = zip(*images.requests(), strict=True)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]

    expected = run(LLM(str(tmp_path), **settings))
    llm = LLM(str(tmp_path), **settings, **shared_out)
    assert run(llm) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("shared_out", [{}, *SHARED_OUT.values()], ids=["one", *SHARED_OUT])
def test_sleep(tmp_path: Path, shared_out: dict[str, Any]) -> None:
    """Weights and blocks lie elsewhere afterwards; blocks are swapped before and behind that."""
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    settings = {**settings_of(""), "device": "cuda", "num_gpu_blocks_override": 8}
    llm = LLM(str(tmp_path), **settings, **shared_out)
    expected = answers(llm, 10)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    for _ in range(2):
        llm.sleep()
        held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # where something of it was, perhaps
        llm.wake_up()
        assert answers(llm, 10) == expected
        del held
    llm.llm_engine.close()


def test_a_part_of_the_weights_takes_its_memory_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    build("LlamaForCausalLM", "gqa", tmp_path, **sizes, num_key_value_heads=8)
    gpu = torch.device("cuda", torch.cuda.current_device())

    def taken(**part: Any) -> int:
        before = torch.cuda.memory_allocated(gpu)
        model = load_model(tmp_path, "bfloat16", gpu, **part)
        return torch.cuda.memory_allocated(gpu) - before if model is not None else 0

    whole, pipe = taken(), None
    for rank in range(2):
        own: Any = SimpleNamespace(rank=rank, size=2)
        assert taken(shard=Shard(rank, 2, own)) < 0.6 * whole
        assert taken(stage=Stage(rank, 2, pipe)) < 0.6 * whole  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_by_nccl(dtype: torch.dtype) -> None:
    """As far as one GPU goes: NCCL takes no two processes on one."""
    store = meeting_store("127.0.0.1")
    group = join_gpus("127.0.0.1", store.port, 0, 1, 60)
    exchange = CollectiveExchange(group, 0, 1, torch.device("cuda", torch.cuda.current_device()))
    for parties in shared(1):  # through memory
        assert of_all("ab" * 32, Shard(0, 1, exchange), None) == of_all("ab" * 32, Shard(0, 1, parties[0]), None)
    own = torch.arange(35, device="cuda").view(5, 7).to(dtype)
    for _ in range(2):
        assert torch.equal(exchange.gather(own, Columns([[3], [4]])), own)
    assert exchange.least(2**40) == 2**40
