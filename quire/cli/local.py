"""`quire run` at work: an engine of this process, its answers streamed to the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from quire.cli.conversation import BASE, Answer, Conversation, Message, report
from quire.cli.pictures import picture_part, read_image
from quire.cli.task import Task
from quire.cli.terminal import INTERRUPTED, ended_by_ctrl_c, write
from quire.config import MediaConfig
from quire.demo import ADAPTERS, adapter_path
from quire.errors import QuireError, RequestError
from quire.lora import LoRARequest
from quire.multimodal.fetch import read_http
from quire.platform.engine.interrupts import HeldInterrupt
from quire.platform.engine.llm import LLM
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.inputs.chat import render_chat
from quire.platform.inputs.processor import PromptType
from quire.platform.sampling.params import RequestOutputKind, SamplingParams
from quire.server.cores import use_share

_serial = count()


def run(task: Task, sampling: Mapping[str, Any], settings: Mapping[str, Any], verbose: bool) -> None:
    """Load the model and answer. Raises QuireError; exits with 130 when Ctrl-C ends the only answer."""
    if task.model is None and settings.get("revision"):
        raise QuireError("--revision is for models of the hub; the bundled model has none. Name a model.")
    use_share()
    params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
    images = [read_image(source) for source in task.images]
    for source, data in zip(task.images, images, strict=True):
        picture_part(source, data)  # what is no picture is refused before the model is loaded
    # Whoever names a URL here wants it fetched.
    hosts = [_host(source) for source in images if isinstance(source, str)]
    adapters = [_adapter(name, task.model) for name in task.adapters] or [None]
    lora = bool(task.adapters) or task.chat  # which may ask for one with /lora
    with ended_by_ctrl_c():
        llm = LLM(task.model, max_num_seqs=1, allowed_media_domains=hosts, enable_lora=lora, **settings)
    if task.chat:
        partner = Voice(llm, params, task.model, adapters[0])
        Conversation(partner, verbose, images=task.images).hold(task.prompt)
        return
    assert task.prompt is not None
    prompt: PromptType = task.prompt
    if not task.raw and getattr(llm.llm_engine.tokenizer, "chat_template", None):
        prompt = _render(llm, [_message(task.prompt, images)])
    elif images:
        prompt = {"prompt": task.prompt, "multi_modal_data": {"image": images}}
    for adapter in adapters:
        if len(adapters) > 1:
            write(f"{adapter.lora_name if adapter else BASE}: ")
        answer = stream(llm.llm_engine, prompt, params, write, adapter)
        report(answer, verbose)
        if answer.finish_reason == "interrupted":
            raise typer.Exit(INTERRUPTED)


def _adapter(name: str, model: str | None) -> LoRARequest | None:
    """Of the bundled model's adapters by name, or of a folder; a folder's name becomes the adapter's."""
    if name == BASE:
        return None
    if model is None and name in ADAPTERS:
        return LoRARequest(name, lora_path=str(adapter_path(name)))
    folder = Path(name)
    known = folder.name if folder.name not in ("", "..") else folder.resolve().name  # of . and ..
    return LoRARequest(known or name, lora_path=name)


def _host(url: str) -> str:
    """As `allowed_media_domains` has it: with the port, where that is not the scheme's own."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise QuireError(f"{url[:100]}: {error}") from None
    return name if port in (None, 80, 443) else f"{name}:{port}"


def _message(text: str, images: Sequence[str | bytes]) -> Message:
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _render(llm: LLM, messages: Sequence[Message]) -> PromptType:
    image_spec = llm.llm_engine.input_processor.image_spec
    marker, lay_out = (image_spec.marker, image_spec.written) if image_spec else (None, None)
    numbered, words = (image_spec.numbered, image_spec.words) if image_spec else (None, {})
    chat = render_chat(
        llm.llm_engine.tokenizer,
        messages,
        image_marker=marker,
        lay_out=lay_out,
        numbered=numbered,
        other_markers=words,
    )
    return {
        "prompt_token_ids": chat.token_ids,
        "multi_modal_data": chat.multi_modal_data,
    }


class Voice:
    """The partner in a conversation: this process's engine, with an adapter or without."""

    def __init__(self, llm: LLM, params: SamplingParams, model: str | None, adapter: LoRARequest | None) -> None:
        self._llm = llm
        self._params = params
        self._model = model
        self._adapter = adapter

    def answer(self, messages: Sequence[Message]) -> Answer:
        return stream(self._llm.llm_engine, _render(self._llm, messages), self._params, write, self._adapter)

    def picture(self, source: str) -> Message:
        data = read_image(source)
        if isinstance(data, str) and not data.startswith("data:"):  # whoever names a URL here wants it fetched
            data = read_http(data, MediaConfig(allowed_media_domains=(_host(data),)))
        return picture_part(source, data)

    def choose(self, name: str) -> None:
        adapter = LoRARequest(name) if name in self._loaded() else _adapter(name, self._model)
        if adapter is not None:
            self._llm.llm_engine.lora.load_for(adapter)
        self._adapter = adapter

    def names(self) -> list[str]:
        bundled = ADAPTERS if self._model is None else ()
        return [BASE, *dict.fromkeys([*bundled, *self._loaded()]), "a folder"]

    def _loaded(self) -> list[str]:
        return [info.name for info in self._llm.list_lora_adapters()]


def stream(
    engine: LLMEngine,
    prompt: PromptType,
    params: SamplingParams,
    show: Callable[[str], None],
    adapter: LoRARequest | None = None,
) -> Answer:
    """Run one request to its end, or until Ctrl-C, showing its text as it comes.

    Raises RequestError for a prompt that cannot be served and for a request that fails on the way.
    """
    request_id = f"run-{next(_serial)}"
    pieces: list[str] = []
    tokens, reason = 0, "interrupted"
    begin = first = last = time.perf_counter()
    engine.add_request(request_id, prompt, params, adapter)
    try:
        with HeldInterrupt() as interrupt:
            while engine.has_unfinished_requests() and not interrupt.take():
                for output in engine.step():
                    completion = output.outputs[0]  # type: ignore[union-attr]
                    last = time.perf_counter()
                    first = last if tokens == 0 else first
                    tokens += len(completion.token_ids)
                    pieces.append(completion.text)
                    show(completion.text)
                    if completion.finish_reason == "error":
                        raise RequestError(f"the request failed: {completion.stop_reason}")
                    reason = completion.finish_reason or reason
    finally:
        engine.abort_request(request_id)  # frees the blocks of an answer that was stopped
        show("\n")
    rate = (tokens - 1) / (last - first) if tokens > 1 and last > first else None
    return Answer("".join(pieces), tokens, reason, first - begin, rate)
