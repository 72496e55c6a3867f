"""Engines whose steps are watched: a step that hangs fails its test, and what is left behind can be asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from quire import LLM, SamplingParams
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.execution.in_process import InProcessExecutor
from tests.multimodal.tiny_vision import IMAGE

WIDTH = 32  # of the tiny models' embeddings
_PATIENCE = 60.0  # seconds without any change


@dataclass(frozen=True)
class Kind:
    """name: a short one. most_tokens: of one of the pictures that tests use."""

    name: str
    architecture: str
    variant: str
    most_tokens: int


KINDS = (
    Kind("llava", "LlavaForConditionalGeneration", "clip", 9),
    Kind("next", "LlavaNextForConditionalGeneration", "clip", 51),
    Kind("qwen", "Qwen2VLForConditionalGeneration", "mrope", 32),
)


def room_for(tokens: int, itemsize: int = 4) -> int:
    """The `media_cache_bytes` whose share of features holds so many tokens, and not one more."""
    return -(-tokens * WIDTH * itemsize * 4 // 3)


def open_llm(path: str, features: int | None = None, **settings: Any) -> LLM:
    """An LLM that checks its tables after each step, and raises where it would hang.

    features: room for those of so many tokens (in float32), and plenty for pixels.
    """
    llm = LLM(path, **{"skip_tokenizer_init": True, "num_gpu_blocks_override": 200, "debug": True, **settings})
    engine = llm.llm_engine
    if features is not None:
        engine.scheduler.encoder.features.capacity = features * WIDTH * 4
    step = engine.step
    before: Any = None
    since, idle = 0.0, 0

    def watched() -> list[Any]:
        nonlocal before, since, idle
        outputs = step()
        state = _state(engine)
        if state != before or not engine.has_unfinished_requests():
            before, since, idle = state, time.monotonic(), 0
        idle += not engine.media.preprocessor._busy  # what nobody works at will not come
        if idle > 50 or time.monotonic() - since > _PATIENCE:
            raise AssertionError("the engine hangs")
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    return llm


def _state(engine: LLMEngine) -> Any:
    """Differs after a step that did anything."""
    sequences = [(s.id, s.num_computed, len(s.output_ids), s.running) for s in engine.scheduler.sequences()]
    return sequences, len(engine.media.waiting), engine.scheduler.num_preemptions, engine.media.preprocessor._busy


def prompt(ids: Sequence[int], images: Any = (), **more: Any) -> dict[str, Any]:
    data = {"multi_modal_data": {"image": list(images) if isinstance(images, tuple) else images}} if images else {}
    return {"prompt_token_ids": list(ids), **data, **more}


def one(image: Any, *, before: Iterable[int] = (5, 6), after: Iterable[int] = (7, 8), **more: Any) -> dict[str, Any]:
    """A prompt with one image in it."""
    return prompt([*before, IMAGE, *after], [image], **more)


def greedy(tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def ask(llm: LLM, prompts: Any, params: Any = None) -> list[Any]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False)


def ask_at_once(llm: LLM, prompts: Any, params: Any = None) -> list[Any]:
    """As `ask`, with all images prepared before the first step: those that come late would find the pool free."""
    engine, chosen = llm.llm_engine, params or [greedy()] * len(prompts)
    for number, (given, one_params) in enumerate(zip(prompts, chosen, strict=True)):
        engine.add_request(str(number), given, one_params)
    all_ready(engine)
    outputs = drive(engine)
    return [outputs[str(number)] for number in range(len(prompts))]


def tokens(llm: LLM, *prompts: Any, ask: Callable[..., list[Any]] = ask) -> list[list[int]]:
    """The greedy tokens of each prompt, all asked together; none may fail."""
    outputs = ask(llm, list(prompts))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(prompts), outputs
    return [list(output.outputs[0].token_ids) for output in outputs]


def error_of(output: Any) -> str:
    """Why a request failed."""
    assert output.finished and [c.finish_reason for c in output.outputs] == ["error"] * len(output.outputs), output
    assert not output.outputs[0].token_ids
    return output.outputs[0].stop_reason


def drive(engine: LLMEngine) -> dict[str, Any]:
    """Step to the end; the last output of each request."""
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    return outputs


def all_ready(engine: LLMEngine) -> None:
    """Wait until all images are prepared, without a step."""
    for _ in range(40):
        if not engine.media.waiting:
            return
        engine._wakeup.wait(0.5)
        engine._wakeup.clear()
        engine.media.take_ready()
    raise AssertionError("images are not prepared")


@contextmanager
def held_back(llm: LLM, chosen: Callable[[Any], bool] = lambda source: True) -> Iterator[threading.Event]:
    """No worker gets past the chosen images until the event is set, or the block ends."""
    preprocessor, gate = llm.llm_engine.media.preprocessor, threading.Event()
    prepare = preprocessor._prepare
    for lane in preprocessor._turns.lanes.values():
        lane.workers = max(2, lane.workers)

    def late(*args: Any) -> Any:
        if chosen(args[0]):
            gate.wait(60)
        return prepare(*args)

    preprocessor._prepare = late
    try:
        yield gate
    finally:
        gate.set()
        preprocessor._prepare = prepare


def wait_until_idle(llm: LLM) -> None:
    """Until the workers are done, without a step of the engine."""
    deadline = time.monotonic() + 60
    while llm.llm_engine.media.preprocessor._busy:
        assert time.monotonic() < deadline, "a worker hangs"
        time.sleep(0.001)


@cache
def _calm(path: str) -> LLM:
    return open_llm(path, enable_prefix_caching=False)


def alone(path: str, *prompts: Any) -> list[list[int]]:
    """The greedy tokens of each prompt, alone in an engine with ample room that shares no blocks."""
    return [tokens(_calm(str(path)), given)[0] for given in prompts]


def until(engine: LLMEngine, condition: Any) -> dict[str, Any]:
    """Step until the condition holds; the last output of each request that had one meanwhile."""
    outputs: dict[str, Any] = {}
    while not condition():
        assert engine.has_unfinished_requests(), "everything ended before"
        outputs.update((output.request_id, output) for output in engine.step())
    return outputs


def nothing_left(llm: LLM) -> None:
    """No block, feature or pixel belongs to anybody, and runner and scheduler agree on what is in memory.

    The garbage collector need not have come: until it does, what it would find keeps other images from being prepared.
    """
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    engine.step()  # an idle one, which lets go of what was evicted last
    engine.check_integrity()
    assert engine.pool.num_owned == 0
    features = engine.scheduler.encoder.features
    assert not any(entry.references for entry in features._entries.values())
    assert features.bytes <= features.capacity
    if isinstance(engine.executor, InProcessExecutor):
        there = engine.executor.runner.encoder.features
        assert set(there) == set(features._entries)
        assert sum(one.nbytes for one in there.values()) == features.bytes
    assert engine.media.preprocessor.pixel_bytes == 0


def count_encodes(llm: LLM) -> list[Any]:
    """A list that takes the inputs of each image that the model encodes from here on."""
    calls: list[Any] = []
    watch_encodes(llm, calls.append)
    return calls


def watch_encodes(llm: LLM, watch: Callable[[Any], None]) -> Callable[[], None]:
    """Have `watch` called with the inputs of each image before the model encodes it, by itself or with others.

    Returns what ends that.
    """
    model: Any = llm.llm_engine.executor.runner.model
    encode, encode_images = model.encode, model.encode_images

    def watched(inputs: Any) -> Any:
        watch(inputs)
        return encode(inputs)

    def all_watched(images: Any) -> Any:
        for inputs in images:
            watch(inputs)
        return encode_images(images)

    def end() -> None:
        model.encode, model.encode_images = encode, encode_images

    model.encode, model.encode_images = watched, all_watched
    return end
