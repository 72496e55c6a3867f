"""A step of any size that is replayed from a recording is the step that Python makes, bit by bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, kernels
from quire.models.loader import load_model
from quire.platform.execution import step_recordings
from tests.models import run_model
from tests.models.rows import all_rows
from tests.models.rows.checks import recorded_steps
from tests.models.tiny import VOCAB, build
from tests.platform.conftest import make_llama

pytestmark = pytest.mark.skipif(
    kernels.backend().__name__ != "quire.kernels.native", reason="the reference kernels are never recorded"
)
QUICK = {"LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "CohereForCausalLM"}
# What states and latents ask of the kernels is not of the step's tokens alone, or lies otherwise for each number.
IN_PYTHON = {
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GraniteMoeHybridForCausalLM", "MiniCPM3ForCausalLM", "YoutuForCausalLM",
}  # fmt: skip
SMALL = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 300, "block_size": 4}


def answers(llm: LLM, count: int = 14) -> list[Any]:
    rng = random.Random(3)
    batch = [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 30))]} for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=1 + i % 7, ignore_eos=True, logprobs=2, temperature=i % 2, seed=i,
            prompt_logprobs=1 if i % 3 == 0 else None,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = llm.generate(batch, params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in all_rows()]
)
def test_of_models_that_generate(architecture: str, tmp_path: Path) -> None:
    path = str(build(architecture, all_rows()[architecture].first, tmp_path))
    more: dict[str, Any] = {**SMALL, "max_num_batched_tokens": 37, "enable_prefix_caching": False}
    eager, replaying = LLM(path, enforce_eager=True, **more), LLM(path, **more)
    expected = answers(eager)
    eager.llm_engine.executor.runner._forward._narrows = False  # all of the last layer is computed
    assert answers(eager) == expected
    for _ in range(3):  # met, recorded, replayed
        assert answers(replaying) == expected
    assert not recorded_steps(eager)
    in_python = architecture in IN_PYTHON or not all_rows()[architecture].recorded
    assert bool(recorded_steps(replaying)) is not in_python
    narrows = replaying.llm_engine.executor.runner.model.narrows and not in_python
    assert any(shape.wanted for shape in recorded_steps(replaying)) is narrows


def test_shapes_serve_what_is_smaller(tmp_path: Path) -> None:
    make_llama(tmp_path, max_position_embeddings=8192)
    more: dict[str, Any] = {
        **SMALL, "block_size": 8, "num_gpu_blocks_override": 900, "max_num_seqs": 100, "max_num_batched_tokens": 2048
    }  # fmt: skip
    llm, eager = LLM(str(tmp_path), **more), LLM(str(tmp_path), enforce_eager=True, **more)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)

    def run(which: LLM, *lengths: int) -> list[Any]:
        batch = [{"prompt_token_ids": [3 + (i * length) % 90 for i in range(length)]} for length in lengths]
        outputs = which.generate(batch, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]

    for lengths in ((100,), (90,), (2,), (3, 4), (131,), (132,), (140,), (1,), (60, 2, 30), (2,) * 70, (3,) * 68):
        assert run(llm, *lengths) == run(eager, *lengths)
    shapes = {(one.tokens, one.sequences, one.wanted) for one in recorded_steps(llm)}
    assert shapes == {(131, 64, 0), (269, 64, 0), (269, 512, 0)}
    for lengths in ((1500,), (1032,), (1031,), (1028,)):  # the first two are left to Python
        assert run(llm, *lengths) == run(eager, *lengths)
    assert max(one.tokens for one in recorded_steps(llm)) == 1031


def test_weights_and_pool_may_move(tmp_path: Path) -> None:
    """While the engine sleeps."""
    path = str(build("LlamaForCausalLM", "gqa", tmp_path))
    more: dict[str, Any] = {**SMALL, "max_num_batched_tokens": 37, "enable_prefix_caching": False}
    llm = LLM(path, **more)
    expected = answers(llm)
    assert answers(llm) == answers(llm) == expected
    assert recorded_steps(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert not recorded_steps(llm)
        assert answers(llm) == answers(llm) == answers(llm) == expected
        assert recorded_steps(llm)


def test_only_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recordings, "_MOST_SHAPES", 2)
    monkeypatch.setattr(step_recordings, "_TOKENS", (2, 3, 11, 31, 127))
    path = str(build("LlamaForCausalLM", "gqa", tmp_path))
    more: dict[str, Any] = {**SMALL, "enable_prefix_caching": False}
    llm, eager = LLM(path, **more), LLM(path, enforce_eager=True, **more)
    for count in (1, 3, 8, 14, 1, 3, 3, 3):
        assert answers(llm, count) == answers(eager, count)
    (own,) = llm.llm_engine.executor.runner._forward._recordings._free
    assert len(own.of) == 2


def test_a_failed_step_leaves_recordings_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(build("LlamaForCausalLM", "gqa", tmp_path))
    llm = LLM(path, **SMALL, enable_prefix_caching=False)
    expected = answers(llm)
    assert answers(llm) == expected
    before = recorded_steps(llm)
    run, fails = step_recordings._Recorded.run, iter([True])

    def once(self: Any, *given: Any) -> Any:
        if next(fails, False):
            raise RuntimeError("made up")
        return run(self, *given)

    monkeypatch.setattr(step_recordings._Recorded, "run", once)
    assert answers(llm) == expected  # the step is made again
    assert next(fails, None) is None and set(before) <= set(recorded_steps(llm))


def test_threads_have_recordings_of_their_own(tmp_path: Path) -> None:
    """Many at once, each with other tokens in rows of the same memory's shape."""
    model = load_model(build("LlamaForCausalLM", "gqa", tmp_path), torch.float32)
    caches, table = run_model.pool(model, 8 * 40, 4)
    own = step_recordings.StepRecordings(model, caches, torch.device("cpu"), enforce_eager=False)
    steps = []
    for number in range(8):
        ids = torch.tensor([3 + (i * number) % 90 for i in range(13 + number)])
        context = run_model.context(table[:, 10 * number : 10 * number + 10], 0, len(ids), len(ids), 4)
        steps.append((ids, context))
    with torch.inference_mode():
        expected = [model(model.embed(ids), context, caches) for ids, context in steps]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.inference_mode():
            for _ in range(30):
                if not torch.equal(own(*steps[number]), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong and any(some.of for some in own._free)


def test_an_interrupted_thread_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an interrupt has kept from saying that it has left: meanwhile steps are made in Python."""
    monkeypatch.setattr(step_recordings, "_PATIENCE", 0.01)
    llm = LLM(str(build("LlamaForCausalLM", "gqa", tmp_path)), **SMALL, enable_prefix_caching=False)
    own = llm.llm_engine.executor.runner._forward._recordings
    expected = answers(llm)
    own._in_python.add(-1)
    assert answers(llm) == expected and not recorded_steps(llm)
    own._in_python.clear()
    own._in_python.add(threading.get_ident())  # this one begins a step, and so has left
    assert answers(llm) == expected and recorded_steps(llm) and not own._in_python
