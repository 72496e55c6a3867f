"""A replayed step is the step that it replaces, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams, kernels
from quire.models.decoder import Decoder
from quire.platform.execution import decode_graphs as decode
from quire.platform.sampling import sampler
from tests.models.tiny import VOCAB, build
from tests.platform.conftest import make_llama

pytestmark = pytest.mark.skipif(
    kernels.backend().__name__ != "quire.kernels.native", reason="the reference kernels are never recorded"
)


def answers(llm: LLM, count: int, tokens: int = 24) -> list[tuple]:
    """Prompts of mixed lengths whose answers end at different steps."""
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]} for _ in range(count)]
    params = [
        SamplingParams(max_tokens=tokens - i % 9, ignore_eos=True, logprobs=3, temperature=i % 3, seed=i)
        for i in range(count)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def recorded(llm: LLM) -> list[decode.Shape]:
    return [shape for shape, made in llm.llm_engine.executor.runner._decode._shapes.items() if made is not None]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("LlamaForCausalLM", "gqa"),
        ("LlamaForCausalLM", "tied"),
        ("OPTForCausalLM", "post_norm"),
        ("OPTForCausalLM", "projected"),
        ("GPT2LMHeadModel", "relu"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_equal_the_model(tmp_path, architecture, variant, dtype) -> None:
    build(architecture, variant, tmp_path)
    settings = {"dtype": dtype, "skip_tokenizer_init": True, "debug": True, "num_gpu_blocks_override": 300}
    eager, replaying = LLM(str(tmp_path), enforce_eager=True, **settings), LLM(str(tmp_path), **settings)
    expected = answers(eager, 12)
    for _ in range(2):  # the second time, from recordings that others have used the memory of since
        assert answers(replaying, 12) == expected
    assert not recorded(eager)
    assert {tokens for tokens, *_ in recorded(replaying)} >= {2, 4, 12}


def test_tables_grow_under_a_recording(tmp_path) -> None:
    """Past the width of the block table and past the positions that a recording was made for."""
    make_llama(tmp_path, max_position_embeddings=8192)
    settings = {"skip_tokenizer_init": True, "block_size": 8, "num_gpu_blocks_override": 700}
    llm, eager = LLM(str(tmp_path), **settings), LLM(str(tmp_path), enforce_eager=True, **settings)
    prompts = [{"prompt_token_ids": [3 + i % 300 for i in range(length)]} for length in (100, 250, 2030)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)

    def run(which: LLM) -> list[tuple]:
        outputs = which.generate(prompts, params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    def alone(which: LLM) -> tuple:
        output = which.generate({"prompt_token_ids": [7] * 50}, params, use_tqdm=False)[0].outputs[0]
        return output.token_ids, output.logprobs

    expected = alone(eager)
    assert alone(llm) == expected  # recorded with the first table of rotations
    assert run(llm) == run(eager)
    junk = [torch.full((1 << 18,), torch.nan) for _ in range(20)]  # where that table was, if it is gone
    assert alone(llm) == expected
    del junk
    shapes = recorded(llm)
    assert {width for tokens, width, *_ in shapes} >= {16, 512}
    assert {limit for tokens, _, limit, *_ in shapes if tokens == 3} == {2048, 4096}


def test_steps_past_the_length_that_changes_frequencies(tmp_path) -> None:
    """Below it, steps are recorded as for any model; beyond, each length has frequencies of its own."""
    build("LlamaForCausalLM", "rope_dynamic", tmp_path)
    settings = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
    llm, eager = LLM(str(tmp_path), **settings), LLM(str(tmp_path), enforce_eager=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

    def run(which: LLM, length: int) -> tuple:
        output = which.generate({"prompt_token_ids": [5 + i for i in range(length)]}, params, use_tqdm=False)[0]
        return output.outputs[0].token_ids, output.outputs[0].logprobs

    for length in (4, 18, 30, 4):  # its threshold is 24
        assert run(llm, length) == run(eager, length)
    assert {tokens for tokens, *_ in recorded(llm)} == {1}


def test_only_so_many_shapes_are_remembered(tiny_path, monkeypatch) -> None:
    monkeypatch.setattr(decode, "_MOST_SHAPES", 3)
    llm = LLM(str(tiny_path))
    expected = answers(LLM(str(tiny_path), enforce_eager=True), 9)
    assert answers(llm, 9) == expected and answers(llm, 9) == expected
    assert len(llm.llm_engine.executor.runner._decode._shapes) == 3


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 4}], ids=["none", "ngram"])
def test_a_step_of_single_tokens_looks_through_its_logits_once(tiny_path, monkeypatch, speculative) -> None:
    """For the likeliest tokens: in the step itself, with drafts too, and never once for each draft that was right."""
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 6}
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, seed=3)]
    llm = LLM(str(tiny_path), speculative_config=speculative)
    steps, looks = 0, []
    execute, likeliest = llm.llm_engine.executor.runner._execute, kernels.likeliest

    def counted_step(plan, sequences):
        nonlocal steps
        steps += bool(plan.chunks) and all(chunk.length == 1 + len(chunk.drafts) for chunk in plan.chunks)
        return execute(plan, sequences)

    monkeypatch.setattr(llm.llm_engine.executor.runner, "_execute", counted_step)
    monkeypatch.setattr(kernels, "likeliest", lambda logits: looks.append(len(logits)) or likeliest(logits))
    monkeypatch.setattr(sampler, "likeliest_of", lambda logits: looks.append(len(logits)) or likeliest(logits).tolist())
    llm.generate([prompt] * 2, params, use_tqdm=False)
    assert steps >= 5
    # One look for the prompts, which are one step; recorded steps call no Python.
    assert len(looks) <= 1 + steps - len(recorded(llm))


def test_a_model_that_does_more_is_not_recorded(tiny_path, monkeypatch, caplog) -> None:
    """A replay would leave out what torch computes. It is said once, with the operation and its place."""
    forward = Decoder.forward

    def odd(self, input_ids: torch.Tensor, ctx, kv) -> torch.Tensor:
        return forward(self, input_ids, ctx, kv) * (1 + ctx.positions[:, None] % 2)

    monkeypatch.setattr(Decoder, "forward", odd)
    llm, eager = LLM(str(tiny_path)), LLM(str(tiny_path), enforce_eager=True)
    for _ in range(2):
        assert answers(llm, 6) == answers(eager, 6)
    assert not recorded(llm)
    (said,) = [record for record in caplog.records if record.name == "quire" and record.levelname == "WARNING"]
    line = odd.__code__.co_firstlineno + 1
    assert "LlamaForCausalLM" in said.message and "aten." in said.message
    assert f"{Path(__file__).name}, line {line}" in said.message


def test_a_failing_replay_fails_its_request_alone(tiny_path) -> None:
    """A kernel's check that fails in a replay is an error of that step's requests; the engine goes on."""
    llm = LLM(str(tiny_path), debug=True)
    expected = answers(llm, 4)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine.add_request("bad", {"prompt_token_ids": [5, 6]}, params)
    engine.step()
    engine.scheduler.running[0].token_ids[-1] = 10_000
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "error" and "ids" in outputs[-1].outputs[0].stop_reason
    assert answers(llm, 4) == expected
