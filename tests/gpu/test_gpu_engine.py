"""The engine on a GPU: graphs, steps that overlap, memory. Parity and the promise are the CPU's tests with
QUIRE_DEVICE=cuda, which `make test-gpu` runs too."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, QuireError, SamplingParams
from tests.lora import adapter_files
from tests.lora.adapter_files import write
from tests.lora.test_expert_adapters import by_expert, config
from tests.models import tiny
from tests.platform.conftest import make_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_llama(folder, torch.bfloat16, head_dim=64)
    return str(folder)


def open_llm(path: str, **settings: Any) -> LLM:
    return LLM(path, device="cuda", num_gpu_blocks_override=settings.pop("blocks", 400), **settings)


def answers(llm: LLM, count: int, adapters: Any = None) -> list[Any]:
    rng = random.Random(4)
    batch = [{"prompt_token_ids": [rng.randrange(3, 380) for _ in range(rng.randint(2, 60))]} for _ in range(count)]
    params = [
        SamplingParams(temperature=i % 2, seed=i, top_p=0.95, max_tokens=10 + i % 20, ignore_eos=True)
        for i in range(count)
    ]
    outputs = llm.generate(batch, params, lora_request=adapters, use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    return [output.outputs[0].token_ids for output in outputs]


def graphs(llm: LLM) -> list[Any]:
    return [shape for shape, one in llm.llm_engine.executor.runner._decode._shapes.items() if one is not None]


def test_graphs_equal_the_model(path: str) -> None:
    eager, captured = open_llm(path, enforce_eager=True), open_llm(path)
    assert captured.llm_engine.executor.runner.device.type == "cuda" and captured.llm_engine.executor.runner.looks_ahead
    for count in (1, 3, 12, 30):
        expected = answers(eager, count)
        for _ in range(2):
            assert answers(captured, count) == expected
    assert not graphs(eager) and len(graphs(captured)) >= 4


def test_graphs_with_adapters(tmp_path: Path) -> None:
    make_llama(tmp_path / "model", torch.bfloat16)  # of the sizes of `adapter_files`
    path = str(tmp_path / "model")
    folders = [str(adapter_files.plain(tmp_path / str(i), seed=i, rank=4 * (i + 1))) for i in range(3)]
    requests = [LoRARequest(str(i), i + 1, folders[i]) for i in range(3)]
    mixed = [[None, *requests][i % 4] for i in range(12)]
    eager, captured = open_llm(path, enforce_eager=True, enable_lora=True), open_llm(path, enable_lora=True)
    expected = answers(eager, 12, mixed)
    assert expected != answers(eager, 12)
    for _ in range(2):
        assert answers(captured, 12, mixed) == expected
    assert any(shape[-1] for shape in graphs(captured))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM"])
def test_graphs_of_experts(architecture: str, tmp_path: Path) -> None:
    model = str(tiny.build(architecture, "as_published", tmp_path / "model", vocab_size=384))
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True}
    eager, captured = open_llm(model, enforce_eager=True, **settings), open_llm(model, **settings)
    for count in (1, 12):
        expected = answers(eager, count)
        for _ in range(2):
            assert answers(captured, count) == expected
    assert len(graphs(captured)) >= 2


def test_graphs_with_adapters_of_experts(tmp_path: Path) -> None:
    model = str(tiny.build("MixtralForCausalLM", "as_published", tmp_path / "model", vocab_size=384))
    folders = [str(write(tmp_path / str(i), config(i + 2), by_expert(i + 2, i, layers=3))) for i in range(2)]
    requests = [LoRARequest(str(i), i + 1, folder) for i, folder in enumerate(folders)]
    mixed = [[None, *requests][i % 3] for i in range(12)]
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_lora": True}
    eager, captured = open_llm(model, enforce_eager=True, **settings), open_llm(model, **settings)
    expected = answers(eager, 12, mixed)
    assert expected != answers(eager, 12)
    for _ in range(2):
        assert answers(captured, 12, mixed) == expected
    assert any(shape[-1] for shape in graphs(captured))


@pytest.mark.parametrize("with_experts", [False, True])
def test_a_step_waits_for_nothing(path: str, with_experts: bool, tmp_path: Path) -> None:
    """Torch raises where the host would wait for the GPU. It does not see events, by which tokens are read."""
    if with_experts:
        path = str(tiny.build("MixtralForCausalLM", "as_published", tmp_path, vocab_size=384))
    llm = open_llm(path, skip_tokenizer_init=True)
    engine, execute = llm.llm_engine, llm.llm_engine.executor.runner.execute
    checked = []

    def strict(plan: Any) -> Any:
        steady = all(chunk.length == 1 for chunk in plan.chunks) and len(graphs(llm)) > 0
        torch.cuda.set_sync_debug_mode("error" if steady else "default")
        try:
            checked.append(steady)
            return execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    answers(llm, 8)
    engine.executor.runner.execute = strict
    answers(llm, 8)
    assert sum(checked) > 10


def test_a_capture_that_fails_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream is the same, and later captures and answers are right."""
    expected = answers(open_llm(path, enforce_eager=True), 6)
    llm = open_llm(path)
    stream, decode = torch.cuda.current_stream(), llm.llm_engine.executor.runner._decode
    hidden = decode._hidden

    def waiting(inputs: Any, segments: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            int(inputs.token_ids.max())
        return hidden(inputs, segments)

    monkeypatch.setattr(decode, "_hidden", waiting)
    assert answers(llm, 6) == expected and not graphs(llm)
    assert torch.cuda.current_stream() == stream
    for _ in range(2):
        assert answers(captured := open_llm(path), 6) == expected
    assert graphs(captured)


def test_preempted_sequences_go_on(path: str) -> None:
    expected = answers(open_llm(path), 24)
    for swap in (0, 1):
        llm = open_llm(path, blocks=40, swap_space=swap)
        assert answers(llm, 24) == expected
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_the_pool_is_what_is_left(path: str) -> None:
    llm = LLM(path, device="cuda", gpu_memory_utilization=0.3, max_model_len=256, max_num_seqs=64)
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.memory_allocated() < 0.3 * total
    assert llm.llm_engine.pool.num_blocks > 0
    del llm
    gc.collect()
    with pytest.raises(QuireError, match="gpu_memory_utilization"):
        LLM(path, device="cuda", gpu_memory_utilization=1e-6)


def test_a_device_that_is_not_there(path: str) -> None:
    with pytest.raises(QuireError, match="device='cuda:99'"):
        LLM(path, device="cuda:99")


def test_inexact_products_answer_too(path: str) -> None:
    exact = answers(open_llm(path), 8)
    inexact = answers(open_llm(path, exact_products=False), 8)
    assert [len(one) for one in inexact] == [len(one) for one in exact]
    answers(open_llm(path), 1)  # exact again, for the tests that follow
