"""A model computed by several processes gives the very bits of one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, QuireError, SamplingParams
from quire.errors import AdapterError, WorkerDiedError
from quire.platform.execution import remote as remotes
from quire.platform.execution import sharded
from tests.lora import adapter_files
from tests.models.tiny import VOCAB, build
from tests.platform.execution.executors.helpers import GREEDY, ended, pids_of, processes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# Wide enough that every process has rows of most layers: they are cut by 32.
WIDE = {"hidden_size": 128, "intermediate_size": 224}
CASES = {
    "as many heads as processes": ("LlamaForCausalLM", "gqa", WIDE, 2),
    "more processes than heads of keys": ("LlamaForCausalLM", "gqa", {**WIDE, "num_attention_heads": 8}, 4),
    "heads that do not go round": ("LlamaForCausalLM", "tied", {**WIDE, "num_key_value_heads": 4}, 3),
    "processes without rows": ("LlamaForCausalLM", "gqa", {}, 4),
    "slopes": ("BloomForCausalLM", None, {}, 2),
    "transposed weights": ("GPT2LMHeadModel", "relu", {"n_embd": 128, "n_head": 4}, 2),
    "experts": ("MixtralForCausalLM", "odd_sizes", WIDE, 2),
    "latents": ("DeepseekV2ForCausalLM", None, {}, 2),
    "sinks and windows": ("GptOssForCausalLM", None, {}, 2),
    "states": ("GraniteMoeHybridForCausalLM", None, {}, 2),
    "transformers' own modules": ("LlamaForCausalLM", "gqa", WIDE, 2),
}
# Beside a model's own.
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "chunks and preemptions": {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 12},
}


def answers(llm: LLM, count: int = 6) -> list[Any]:
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]} for _ in range(count)]
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, temperature=i % 3, seed=i) for i in range(count)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def settings_of(name: str) -> dict[str, Any]:
    own = {"model_impl": "transformers"} if name == "transformers' own modules" else {}
    return {"dtype": "bfloat16", "skip_tokenizer_init": True, "num_gpu_blocks_override": 100, **own}


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose processes cannot share memory: they send their columns to one another."""
    monkeypatch.setattr(sharded, "can_share_memory", lambda: False)


@pytest.fixture(params=["shared memory", "messages"])
def both(request: pytest.FixtureRequest) -> None:
    """Processes that share memory, and such that do not."""
    if request.param == "messages":
        request.getfixturevalue("messages")


@pytest.mark.parametrize("name", CASES)
def test_families(tmp_path: Path, name: str) -> None:
    compare_families(tmp_path, name)


@pytest.mark.parametrize("name", ["more processes than heads of keys", "processes without rows", "experts", "states"])
def test_families_by_messages(messages: None, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    compare_families(tmp_path, name)
    assert "run through Python" not in caplog.text, "steps are not recorded"


def compare_families(tmp_path: Path, name: str) -> None:
    from tests.models import rows

    architecture, variant, sizes, size = CASES[name]
    build(architecture, variant or next(iter(rows.entry(architecture)[2])), tmp_path, **sizes)
    expected = answers(LLM(str(tmp_path), **settings_of(name)))
    llm = LLM(str(tmp_path), tensor_parallel_size=size, **settings_of(name))
    for _ in range(2):  # the second time from the prefix cache, and recorded
        assert answers(llm) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_settings(both: None, tmp_path: Path, more: dict[str, Any]) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    settings = {**settings_of(""), **more}
    expected = answers(LLM(str(tmp_path), **settings), 10)
    llm = LLM(str(tmp_path), tensor_parallel_size=2, **settings)
    assert answers(llm, 10) == expected
    llm.llm_engine.close()


def test_vectors(both: None, tmp_path: Path) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    settings = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": True}
    prompts = [{"prompt_token_ids": [5 + i] * (3 + i)} for i in range(5)]
    one, two = (LLM(str(tmp_path), **settings, **more) for more in ({}, {"tensor_parallel_size": 2}))
    found = [[output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)] for llm in (one, two)]
    assert found[0] == found[1]
    two.llm_engine.close()


def test_weights_are_read_again(tmp_path: Path) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    llm = LLM(str(tmp_path), tensor_parallel_size=2, **settings_of(""))
    expected = answers(llm)
    llm.sleep()
    first = processes(llm)[0]
    first.answer(first.ask_memory("read_weights"))  # as in a wake-up that has failed in the other one
    llm.wake_up()
    assert answers(llm) == expected
    llm.llm_engine.close()


def test_what_an_adapter_makes_of_rows_that_are_anothers(tmp_path: Path) -> None:
    """Norms of rows, for tokens that it trained anew, of which each process computes all."""
    folder = build("LlamaForCausalLM", "gqa", tmp_path / "model", **WIDE, tie_word_embeddings=False)
    rows, generator = [5, 20, 40, VOCAB - 9, VOCAB - 5], torch.Generator().manual_seed(0)

    def randn(*shape: int, size: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size

    fields = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["lm_head"],
        "trainable_token_indices": {"lm_head": rows},
    }  # fmt: skip
    tensors = {
        "lm_head.lora_A.weight": randn(2, 128, size=0.1),
        "lm_head.lora_B.weight": randn(VOCAB, 2, size=0.3),
        "lm_head.lora_magnitude_vector": randn(VOCAB, size=0.2).abs() + 1.5,
        "lm_head.token_adapter.trainable_tokens_delta": randn(len(rows), 128, size=0.4),
    }
    adapter = adapter_files.write(
        tmp_path / "dora", fields, {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    )
    settings = {**settings_of(""), "enable_lora": True}

    def run(llm: LLM) -> list[Any]:
        prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(4)]
        lora = LoRARequest("dora", 1, str(adapter))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    llm = LLM(str(folder), tensor_parallel_size=2, **settings)
    assert run(llm) == run(LLM(str(folder), **settings))
    # One that changes between one process's reading and another's is neither the one nor the other.
    other = adapter_files.write(
        tmp_path / "other", fields, {f"base_model.model.{name}": tensor * 2 for name, tensor in tensors.items()}
    )
    second = processes(llm)[1]
    second.read = lambda directory: type(second).read(second, other)
    with pytest.raises(AdapterError, match="changed while they were read"):
        llm.load_lora_adapter("torn", str(adapter))
    llm.llm_engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_dies_ends_all(both: None, tiny_path: Path, rank: int) -> None:
    llm = LLM(str(tiny_path), tensor_parallel_size=2, max_num_seqs=2)
    engine, pids = llm.llm_engine, pids_of(llm)
    for name in "abc":
        engine.add_request(name, "Once", GREEDY)
    engine.step()
    os.kill(pids[rank], signal.SIGKILL)
    outputs = adapter_files.drive(engine)
    for name in "abc":
        assert outputs[name].outputs[0].finish_reason == "error"
        assert f"process {rank} of 2: the worker's process has ended (signal 9)" in outputs[name].outputs[0].stop_reason
    assert "signal 9" in engine.executor.health_error()
    assert all(ended(pid) for pid in pids)
    with pytest.raises(WorkerDiedError, match="signal 9"):
        llm.sleep()


def test_one_that_hangs_ends_all(both: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_path), tensor_parallel_size=2)
    pids = pids_of(llm)
    monkeypatch.setattr(remotes, "ANSWER_SECONDS", 0.5)
    os.kill(pids[1], signal.SIGSTOP)
    output = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and "a process has not answered for 0.5 s" in output.stop_reason
    assert all(ended(pid) for pid in pids)


def test_a_step_that_fails_in_one_alone_ends_all(both: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waits for it in the middle of the step, and would for ever."""
    monkeypatch.setattr(sharded, "_BEHIND_SECONDS", 0.3)
    llm = LLM(str(tiny_path), tensor_parallel_size=2)
    pids = pids_of(llm)
    processes(llm)[1].prepare = lambda plan: None  # it knows nothing of the sequence then
    begin = time.monotonic()
    output = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and time.monotonic() - begin < 60
    assert all(ended(pid) for pid in pids)


def test_an_interrupt_between_two_of_them_ends_all(tiny_path: Path) -> None:
    """One has begun a step that the other never hears of."""
    llm = LLM(str(tiny_path), tensor_parallel_size=2)
    engine, pids = llm.llm_engine, pids_of(llm)

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    processes(llm)[1].execute = interrupted
    engine.add_request("a", "Once", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert "some of the processes alone (KeyboardInterrupt" in engine.executor.health_error()
    assert all(ended(pid) for pid in pids)


def test_what_is_refused(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuireError, match="tensor_parallel_size"):
        LLM(str(tiny_path), tensor_parallel_size=0)
    for given, settings in (({}, {"device": "cuda:1"}), ({"QUIRE_DEVICE": "cuda"}, {})):
        with monkeypatch.context() as environment, pytest.raises(QuireError, match=r"'ray': .* on CPUs alone.*'cuda"):
            for name, value in given.items():
                environment.setenv(name, value)
            LLM(str(tiny_path), distributed_executor_backend="ray", **settings)
    begin = time.monotonic()
    with pytest.raises(QuireError, match="max_model_len=10000"):
        LLM(str(tiny_path), tensor_parallel_size=2, max_model_len=10_000)
    assert time.monotonic() - begin < 60
