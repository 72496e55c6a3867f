"""A model whose layers are several processes' gives the very bits of one, with several steps in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, LoRARequest, QuireError, SamplingParams
from quire.errors import UnsupportedModelError
from quire.platform.execution import remote
from quire.platform.sampling.structured.params import StructuredOutputsParams
from tests.lora import adapter_files
from tests.models.tiny import build
from tests.multimodal import test_image_promise as images
from tests.multimodal.open_engine import nothing_left
from tests.multimodal.tiny_vision import FAMILIES
from tests.multimodal.tiny_vision import build as build_vision
from tests.platform.execution.executors.helpers import GREEDY, ended, pids_of, processes
from tests.platform.execution.executors.test_sharded import SETTINGS, WIDE, answers, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CASES = {
    "uneven": ("LlamaForCausalLM", "gqa", WIDE, {}),
    "three stages": ("LlamaForCausalLM", "tied", WIDE, {"pipeline_parallel_size": 3}),
    "two by two": ("LlamaForCausalLM", "gqa", WIDE, {"tensor_parallel_size": 2}),
    "positions that are added": ("GPT2LMHeadModel", "relu", {}, {}),
    "experts": ("MixtralForCausalLM", "odd_sizes", {}, {}),
    "latents": ("DeepseekV2ForCausalLM", None, {}, {}),
    "sinks and windows": ("GptOssForCausalLM", None, {}, {}),
    "windows in some layers": ("Gemma2ForCausalLM", None, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_families(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    from tests.models import rows

    architecture, variant, sizes, more = CASES[name]
    build(architecture, variant or next(iter(rows.entry(architecture)[2])), tmp_path, **sizes)
    expected = answers(LLM(str(tmp_path), **settings_of(name)))
    llm = LLM(str(tmp_path), **{"pipeline_parallel_size": 2, **settings_of(name), **more})
    for _ in range(2):  # the second time from the prefix cache, and recorded
        assert answers(llm) == expected
    assert "run through Python" not in caplog.text, "steps are not recorded"
    llm.llm_engine.close()


@pytest.mark.parametrize("more", [*SETTINGS.values(), {"max_num_seqs": 3}], ids=[*SETTINGS, "few at a time"])
@pytest.mark.parametrize("stages", [2, 3])
def test_settings(tmp_path: Path, more: dict[str, Any], stages: int) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    settings = {**settings_of(""), **more}
    expected = answers(LLM(str(tmp_path), **settings), 10)
    llm = LLM(str(tmp_path), pipeline_parallel_size=stages, debug=True, **settings)
    assert answers(llm, 10) == expected
    if "num_gpu_blocks_override" in more:
        assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.llm_engine.close()


def test_steps_overlap(tiny_path: Path) -> None:
    """Each has other sequences, as many as the others, and none is waited for before the next is there."""
    llm = LLM(str(tiny_path), pipeline_parallel_size=2, max_num_seqs=8)
    core, executor = llm.llm_engine.core, llm.llm_engine.executor
    seen: list[list[set[int]]] = []
    execute = executor.execute

    def watched(plan: Any) -> Any:
        plans = [*(one.plan for one in core._in_flight), plan]
        seen.append([{chunk.sequence_id for chunk in one.chunks} for one in plans])
        return execute(plan)

    executor.execute = watched
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm.generate(["One", "Two of them", "Three", "Four", "Five"], params, use_tqdm=False)
    together = [plans for plans in seen if len(plans) == 2]
    assert len(together) > 10
    for first, second in together:
        assert not first & second and abs(len(first) - len(second)) <= 1
    assert max(map(len, seen)) == 2
    llm.llm_engine.close()


def test_beams_forks_and_scores(tiny_path: Path) -> None:
    prompts = [{"prompt_token_ids": [5, 6, 7 + i] * (i + 1)} for i in range(5)]
    params = [
        SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=7, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=9, repetition_penalty=1.3, min_tokens=4),
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-c]{4,8}")),
        SamplingParams(temperature=0, max_tokens=1),
    ]  # fmt: skip

    def run(llm: LLM) -> Any:
        found = [
            (output.prompt_logprobs, [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs])
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=5))
        return found, [[(one.tokens, one.cum_logprob) for one in output.sequences] for output in beams]

    expected = run(LLM(str(tiny_path), num_gpu_blocks_override=40))
    llm = LLM(str(tiny_path), num_gpu_blocks_override=40, pipeline_parallel_size=2, debug=True)
    assert run(llm) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2}], ids=["", "two by two"])
def test_images(tmp_path: Path, more: dict[str, Any]) -> None:
    build_vision("LlavaForConditionalGeneration", "clip", tmp_path)
    settings = {"skip_tokenizer_init": True, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 60}
    alone = LLM(str(tmp_path), **settings)
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, **settings, **more)

    def run(llm: LLM) -> Any:
        prompts, params = zip(*images.requests(), strict=True)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        nothing_left(llm)
        return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]

    assert run(llm) == run(alone)
    llm.llm_engine.close()


def test_levels_of_features_are_one_stages(tmp_path: Path) -> None:
    name = "Qwen3VLForConditionalGeneration"
    build_vision(name, next(iter(FAMILIES[name].variants)), tmp_path)
    with pytest.raises(UnsupportedModelError, match="adds features of images to its first"):
        LLM(str(tmp_path), pipeline_parallel_size=2, skip_tokenizer_init=True)


def test_adapters(tiny_path: Path, tmp_path: Path) -> None:
    """Of each, a stage keeps what is of its layers; what is told of it is of the whole."""
    model, settings = str(tiny_path), {"skip_tokenizer_init": True, "enable_lora": True}
    kinds = ("plain", "dora", "saved", "words", "trained_tokens")
    adapters = {name: getattr(adapter_files, name)(tmp_path / name) for name in kinds}
    alone = LLM(model, **settings)
    llm = LLM(model, pipeline_parallel_size=2, **settings)

    def run(llm: LLM) -> Any:
        loras = [LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(adapters.items(), 1)]
        chosen = [None, *loras, *loras]
        prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(len(chosen))]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
        outputs = llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    assert run(llm) == run(alone)
    told, whole = (one.llm_engine.list_lora_adapters() for one in (llm, alone))
    assert [(one.name, one.modules, one.ranks) for one in told] == [(one.name, one.modules, one.ranks) for one in whole]
    for one, other in zip(told, whole, strict=True):
        assert other.bytes <= one.bytes <= other.bytes + 4096, "each stage has its part"
    llm.llm_engine.close()


CHUNKED = {**settings_of(""), "max_num_batched_tokens": 8}


def long_and_short(llm: LLM) -> list[Any]:
    prompts = [{"prompt_token_ids": [3 + 7 * i % 50 for i in range(length)]} for length in (30, 5)]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, logprobs=2)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.llm_engine.check_integrity()
    return [(one.finish_reason, one.token_ids, one.logprobs) for one in outputs]


@pytest.mark.parametrize("debug", [False, True], ids=["", "poisoned"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("position", [3, 20, 31], ids=["at once", "amid a prompt", "at a token"])
def test_a_stage_that_fails_once(
    tmp_path: Path, failing: Callable[..., None], stage: int, position: int, debug: bool
) -> None:
    """What went on from the failed step, the next chunk of its prompt above all, is thrown away with it."""
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    expected = long_and_short(LLM(str(tmp_path), **CHUNKED))
    failing(stage, position, 1)
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, debug=debug, **CHUNKED)
    again = []
    begin_again = llm.llm_engine.scheduler.begin_again
    llm.llm_engine.scheduler.begin_again = lambda plan: (again.append(plan), begin_again(plan))
    assert long_and_short(llm) == expected and again
    assert llm.llm_engine.executor.health_error() is None
    llm.llm_engine.close()


@pytest.mark.parametrize("cached", [False, True])
def test_a_stage_that_fails_again_and_again(tmp_path: Path, failing: Callable[..., None], cached: bool) -> None:
    """Its request ends, and the other goes on."""
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    expected = long_and_short(LLM(str(tmp_path), **CHUNKED))
    failing(1, 29, 10**6)
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, enable_prefix_caching=cached, **CHUNKED)
    found = long_and_short(llm)
    assert found[0][0] == "error" and found[1] == expected[1]
    llm.llm_engine.close()


def test_a_large_answer_and_a_large_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says more than a socket takes is heard before it is told as much."""
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 30.0)
    long = 220_000
    build("LlamaForCausalLM", "gqa", tmp_path, max_position_embeddings=long + 100)
    settings = {"skip_tokenizer_init": True, "max_num_batched_tokens": 3000, "max_num_seqs": 4}
    llm = LLM(str(tmp_path), pipeline_parallel_size=2, kv_cache_memory_bytes=400 << 20, **settings)
    engine = llm.llm_engine
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    engine.add_request("a", {"prompt_token_ids": [5 + i % 80 for i in range(2990)]}, scored)
    engine.step()
    engine.add_request("b", {"prompt_token_ids": [7 + i % 80 for i in range(long)]}, SamplingParams(max_tokens=1))
    ended_: dict[str, Any] = {}
    while "a" not in ended_:
        ended_.update({one.request_id: one for one in engine.step() if one.finished})
    assert len(ended_["a"].prompt_logprobs) == 2990 and engine.executor.health_error() is None
    engine.abort_request(["b"])
    engine.close()


def test_an_interrupt_between_two_answers(tiny_path: Path) -> None:
    """A step in flight is not lost."""
    expected = LLM(str(tiny_path)).generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm = LLM(str(tiny_path), pipeline_parallel_size=2)
    engine = llm.llm_engine
    second, answers = processes(llm)[1], iter(range(100))
    answer = second.answer

    def interrupted(number: int) -> Any:
        if next(answers) == 1:
            raise KeyboardInterrupt
        return answer(number)

    second.answer = interrupted
    for name in "abc":
        engine.add_request(name, "Once upon", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        adapter_files.drive(engine)
    outputs = adapter_files.drive(engine)
    assert next(answers) > 2
    assert outputs["c"].outputs[0].token_ids == expected and engine.executor.health_error() is None
    engine.close()


def test_a_message_that_fails_in_a_later_stage(tiny_path: Path) -> None:
    """The stage makes no step then, and the others do not wait for it."""
    expected = LLM(str(tiny_path)).generate(["One", "Two", "Three"], GREEDY, use_tqdm=False)
    llm = LLM(str(tiny_path), pipeline_parallel_size=2)
    engine = llm.llm_engine
    last = processes(llm)[-1]
    execute, count = last.execute, iter(range(100))

    def once(plan: Any) -> Any:
        if next(count) == 3:
            last._post("pixels", b"digest", (), b"no tensors")
            last._post("memory", "no such thing")
            last._send(None)
        return execute(plan)

    last.execute = once
    outputs = llm.generate(["One", "Two", "Three"], GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    assert next(count) > 3 and engine.executor.health_error() is None
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_dies_ends_all(tmp_path: Path, stage: int) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path)
    llm = LLM(str(tmp_path), pipeline_parallel_size=3, max_num_seqs=2, skip_tokenizer_init=True)
    engine, pids = llm.llm_engine, pids_of(llm)
    for name in "abc":
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    engine.step()
    os.kill(pids[stage], signal.SIGKILL)
    outputs = adapter_files.drive(engine)
    for name in "abc":
        assert outputs[name].outputs[0].finish_reason == "error"
        said = outputs[name].outputs[0].stop_reason
        assert f"process {stage} of 3" in said or "another stage of the pipeline is gone" in said
    assert all(ended(pid) for pid in pids)
    assert not engine.has_unfinished_requests()


def test_an_abort_while_steps_are_in_flight(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), pipeline_parallel_size=2, debug=True, max_num_seqs=4)
    engine = llm.llm_engine
    for name in "abcde":
        engine.add_request(name, "Once upon", GREEDY)
    engine.step()
    engine.step()
    engine.abort_request(["a", "d"])
    outputs = adapter_files.drive(engine)
    expected = LLM(str(tiny_path)).generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert {name for name, one in outputs.items() if one.outputs[0].token_ids == expected} >= set("bce")
    assert engine.pool.num_owned == 0 and not engine.core._in_flight
    llm.sleep()
    llm.wake_up()
    assert llm.generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    engine.close()


def test_what_is_refused(tiny_path: Path) -> None:
    with pytest.raises(QuireError, match="'uni' and pipeline_parallel_size=2"):
        LLM(str(tiny_path), pipeline_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(UnsupportedModelError, match="pipeline_parallel_size=9"):
        LLM(str(tiny_path), pipeline_parallel_size=9)
    with pytest.raises(UnsupportedModelError, match="is not cut between its layers"):
        LLM(str(tiny_path), pipeline_parallel_size=2, runner="pooling", convert="embed")
