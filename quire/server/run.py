"""`quire run`: one answer or a conversation, streamed to the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import typer

from quire.demo import ADAPTERS, adapter_path
from quire.errors import QuireError, RequestError
from quire.lora import LoRARequest
from quire.platform.chat import render_chat
from quire.platform.engine import LLMEngine
from quire.platform.intake import PromptType
from quire.platform.interrupts import HeldInterrupt
from quire.platform.llm import LLM
from quire.platform.sampling_params import RequestOutputKind, SamplingParams
from quire.server.cores import use_share
from quire.server.terminal import error_console, print_error

_BASE = "base"  # what --lora calls the model itself

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended, as shells have it

# A model's text must not move the cursor or change the terminal's settings.
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")})

# Green; the \x01 and \x02 tell readline what takes no room. `input` itself prints it, once it listens to Ctrl-C.
_ASK = "\x01\x1b[1;32m\x02>>> \x01\x1b[0m\x02"

_serial = count()


@dataclass(frozen=True)
class Task:
    """What the arguments ask for.

    model None: the bundled one. prompt None: none yet, ask for it. images: paths of files, or URLs. adapters: whom to
    ask, by folder or name; none: the model itself.
    """

    model: str | None
    prompt: str | None
    chat: bool
    raw: bool
    images: Sequence[str] = ()
    adapters: Sequence[str] = ()

    @classmethod
    def from_words(
        cls,
        words: list[str],
        chat: bool | None,
        raw: bool,
        images: Sequence[str] = (),
        adapters: Sequence[str] = (),
    ) -> Task:
        """Tell the model from the prompt by the number of words; read stdin where that is the prompt."""
        if chat and len(adapters) > 1:
            raise QuireError("--chat takes one --lora: a conversation is with one of them.")
        if len(words) > 2:
            raise QuireError(f"{len(words)} arguments: quote the prompt, as in quire run MODEL 'a prompt'.")
        if chat:
            model, prompt = [*words, None, None][:2]
            return cls(model, _stdin_text(raw) if prompt == "-" else prompt, True, raw, images, adapters)
        model, prompt = [None, None, *words][-2:]
        # os.path's answer is no, where Path's may be an OSError: a long prompt is no name of a file
        if len(words) == 1 and words[0] and os.path.isfile(os.path.join(words[0], "config.json")):
            raise QuireError(f"{words[0]} is a model: add a prompt, or '-' to read it from stdin, or --chat.")
        if prompt is None and chat is None and not raw and sys.stdin.isatty():
            return cls(model, None, True, raw, images, adapters)
        return cls(model, _stdin_text(raw) if prompt in (None, "-") else prompt, False, raw, images, adapters)


def _stdin_text(raw: bool) -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _undecodable(error) from None
    # The newline that a shell's echo adds would change what the model continues.
    text = text.removesuffix("\n") if raw else text.strip()
    if not text:
        raise QuireError("no prompt: give it as an argument or on standard input.")
    return text


def _undecodable(error: UnicodeDecodeError) -> QuireError:
    return QuireError(
        f"standard input is not {error.encoding} (byte 0x{error.object[error.start]:02x} at place {error.start}): "
        "convert it, with iconv for example."
    )


def run(task: Task, sampling: Mapping[str, Any], settings: Mapping[str, Any], verbose: bool) -> None:
    """Load the model and answer. Raises QuireError; exits with 130 when Ctrl-C ends the only answer."""
    if task.model is None and settings.get("revision"):
        raise QuireError("--revision is for models of the hub; the bundled model has none. Name a model.")
    use_share()
    params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
    images = [_read_image(source) for source in task.images]
    # Whoever names a URL here wants it fetched.
    hosts = [_host(source) for source in images if isinstance(source, str)]
    adapters = [_adapter(name, task.model) for name in task.adapters] or [None]
    llm = LLM(task.model, max_num_seqs=1, allowed_media_domains=hosts, enable_lora=bool(task.adapters), **settings)
    if task.chat:
        _converse(llm, params, task.prompt, images, verbose, adapters[0])
        return
    assert task.prompt is not None
    prompt: PromptType = task.prompt
    if not task.raw and getattr(llm.get_tokenizer(), "chat_template", None):
        prompt = _render(llm, [_message(task.prompt, images)])
    elif images:
        prompt = {"prompt": task.prompt, "multi_modal_data": {"image": images}}
    for adapter in adapters:
        if len(adapters) > 1:
            _write(f"{adapter.lora_name if adapter else _BASE}: ")
        answer = stream(llm.llm_engine, prompt, params, _write, adapter)
        _report(answer, verbose)
        if answer.finish_reason == "interrupted":
            raise typer.Exit(INTERRUPTED)


def _adapter(name: str, model: str | None) -> LoRARequest | None:
    """Of the bundled model's adapters by name, or of a folder; a folder's name becomes the adapter's."""
    if name == _BASE:
        return None
    if model is None and name in ADAPTERS:
        return LoRARequest(name, lora_path=str(adapter_path(name)))
    return LoRARequest(Path(name).name or name, lora_path=name)


def _read_image(source: str) -> str | bytes:
    """A URL of the web, and a data: URL, as they are; of a file, its bytes."""
    if source.lower().startswith(("http://", "https://", "data:")):
        return source
    path = url2pathname(urlsplit(source).path) if source.lower().startswith("file:") else source
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise QuireError(f"--image {source}: {error.strerror or error}") from None


def _host(url: str) -> str:
    """As `allowed_media_domains` has it: with the port, where that is not the scheme's own."""
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise QuireError(f"--image {url[:100]}: {error}") from None
    return name if port in (None, 80, 443) else f"{name}:{port}"


def _message(text: str, images: Sequence[str | bytes]) -> dict[str, Any]:
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _render(llm: LLM, messages: list[dict[str, Any]]) -> PromptType:
    sight = llm.llm_engine.intake.sight
    chat = render_chat(llm.get_tokenizer(), messages, image_marker=sight.marker if sight else None)
    return {
        "prompt_token_ids": chat.token_ids,
        "multi_modal_data": {"image": chat.images} if chat.images else None,
    }


def _converse(
    llm: LLM,
    params: SamplingParams,
    first: str | None,
    images: Sequence[str | bytes],
    verbose: bool,
    adapter: LoRARequest | None,
) -> None:
    """Ask and answer until the user leaves. What has been said before is found in the prefix cache."""
    messages: list[dict[str, Any]] = []
    if sys.stdin.isatty():
        error_console().print("/clear forgets the conversation, /exit or Ctrl-D leaves.", style="dim")
    while True:
        text = first if first is not None else _ask()
        first = None
        if text is None or text == "/exit":
            return
        if text == "/clear":
            messages.clear()
        if text in ("", "/clear"):
            continue
        messages.append(_message(text, () if messages else images))
        try:
            answer = stream(llm.llm_engine, _render(llm, messages), params, _write, adapter)
        except RequestError as error:
            messages.pop()
            print_error(f"{error} (/clear forgets the conversation so far)" if messages else error)
            if not sys.stdin.isatty():  # nobody is there to mend it
                raise typer.Exit(1) from None
            continue
        messages.append({"role": "assistant", "content": answer.text})
        _report(answer, verbose)


def _ask() -> str | None:
    """The user's next message; None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (importing it gives `input` line editing and a history)
    try:
        return input(_ASK if interactive else "").strip()
    except EOFError:
        if interactive:
            print()
        return None
    except UnicodeDecodeError as error:
        raise _undecodable(error) from None
    except KeyboardInterrupt:  # the line is dropped, as in a shell
        print()
        return ""


@dataclass(frozen=True)
class Answer:
    """What was streamed, and how fast. Times in seconds; rate in tokens per second after the first token."""

    text: str
    num_tokens: int
    finish_reason: str
    time_to_first_token: float
    rate: float | None


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


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _report(answer: Answer, verbose: bool) -> None:
    out = error_console()
    if not (verbose or out.is_terminal):
        return
    facts = [f"{answer.num_tokens} token{'s' * (answer.num_tokens != 1)}"]
    if answer.rate is not None:
        facts.append(f"{answer.rate:.1f} tok/s")
    if answer.num_tokens:
        facts.append(f"first token after {answer.time_to_first_token:.2f} s")
    if answer.finish_reason != "stop":
        facts.append("cut off by the length limit" if answer.finish_reason == "length" else "interrupted")
    out.print(", ".join(facts), style="dim")
