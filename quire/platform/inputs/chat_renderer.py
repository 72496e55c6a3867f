"""The process in which chat templates run.

A chat template is a program that came with a checkpoint. It runs in jinja2's ImmutableSandboxedEnvironment, set up
as transformers does it, and that in a process of its own: no inspection of a template can bound what it costs
(string repetition, nested loops, doubling, filters that pad), but a process can be limited and killed.
Bounded are:

* its variables (messages, tools and the like): MAX_INPUT bytes of JSON;
* the rendered text: MAX_RENDERED characters;
* time: RENDER_SECONDS of waiting, after which the process is killed, and of its processor time by the system;
* memory: RENDER_MEMORY bytes of address space (where the system has such a limit).

The process is started on first use (some 0.1 s), kept, and replaced when it had to be killed. It imports this module:
whatever is heavy stays out of here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import RequestError

MAX_INPUT = 64 << 20
MAX_RENDERED = 16 << 20
RENDER_SECONDS = 5.0
RENDER_MEMORY = 512 << 20

_START_SECONDS = 60.0
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG")
_LENGTH = struct.Struct("<Q")  # precedes every JSON text on the pipes


class TemplateError(RequestError):
    """The template itself failed on what it was given."""


class Renderer:
    """The process that renders, and the parent's end of its pipes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()
        self._number = 0  # of the last job

    def variables(self, template: str) -> list[str]:
        """The names of the variables that the template reads; of one that cannot be read, none. Raises RequestError."""
        try:
            return [str(name) for name in json.loads(self._run(template, None))]
        except TemplateError:
            return []

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of the variables.

        Raises TemplateError for a template that fails; RequestError for what is no JSON, and for a limit exceeded.
        """
        return self._run(template, variables)

    def _run(self, template: str, variables: Mapping[str, Any] | None) -> str:
        """What the process makes of a template and its variables. Without any: a JSON list of those that it reads."""
        try:
            job = json.dumps([template, variables]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages, tools and template_kwargs must be JSON values: {error}") from error
        if len(job) > MAX_INPUT:
            raise RequestError(f"the messages are {len(job)} bytes of JSON, the limit is {MAX_INPUT}.")
        with self._lock:
            done = self._ask(job)
        if done is None:
            raise RequestError(
                f"the chat template did not finish within its limits ({RENDER_SECONDS:g} s, "
                f"{RENDER_MEMORY >> 20} MiB) and was stopped."
            )
        if "error" in done:
            raise TemplateError(f"the chat template failed: {done['error']}")
        return str(done["text"])

    def _ask(self, job: bytes) -> dict[str, Any] | None:
        """The worker's answer; None if it died or had to be killed.

        Whatever interrupts this (Ctrl-C too) ends the process: an answer left in its pipe would be the next caller's.
        """
        try:
            answer = self._exchange(job)
            done = None if answer is None else json.loads(answer)
            if done is not None and done.pop("job") != self._number:
                raise RuntimeError("the process that renders chat templates answered another job; it was stopped")
        except BaseException:
            self.stop()
            raise
        if done is None:
            self.stop()
        return done

    def _exchange(self, job: bytes) -> bytes | None:
        process = self._process
        if process is None or process.poll() is not None or self._parent != os.getpid():
            process = self._start()
        assert process.stdin is not None and process.stdout is not None
        self._number += 1
        limits = json.dumps([self._number, RENDER_SECONDS, RENDER_MEMORY, MAX_RENDERED]).encode()
        answer = None
        try:
            for part in (limits, job):
                process.stdin.write(_LENGTH.pack(len(part)) + part)
            process.stdin.flush()
            deadline = time.monotonic() + RENDER_SECONDS
            head = _read(process.stdout.fileno(), _LENGTH.size, deadline)
            if head is not None:
                answer = _read(process.stdout.fileno(), _LENGTH.unpack(head)[0], deadline)
        except BrokenPipeError:
            pass
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # Isolated from the directory and the environment (which may hold secrets), but importing what this
        # process imports.
        start = (
            "import sys; sys.path[:] = sys.argv[1:]; from quire.platform.inputs.chat_renderer import _serve; _serve()"
        )
        package = str(Path(__file__).resolve().parents[3])
        self._parent = os.getpid()  # a fork must not share the pipes of the process it came from
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, package, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program, not for this process
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        assert self._process.stdout is not None
        if _read(self._process.stdout.fileno(), 1, time.monotonic() + _START_SECONDS) is None:
            self.stop()
            raise RuntimeError("the process that renders chat templates did not start")
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._parent != os.getpid():  # a fork's copy is not the fork's to kill
            return
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(BrokenPipeError):  # what was left to write
                pipe.close()


RENDERER = Renderer()
atexit.register(RENDERER.stop)


def _read(descriptor: int, length: int, deadline: float) -> bytes | None:
    """Exactly `length` bytes; None when the pipe ends or the deadline passes first."""
    parts, missing = [], length
    poll = select.poll()  # select() itself knows no descriptor past 1023
    poll.register(descriptor, select.POLLIN)
    while missing:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        part = os.read(descriptor, min(missing, 1 << 20)) if ready else b""
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _serve() -> None:
    """The rendering process: jobs from standard input, answers to standard output, until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    environment = _environment()
    target.write(b"!")  # ready
    target.flush()
    while head := source.read(_LENGTH.size):
        number, seconds, memory, longest = json.loads(source.read(_LENGTH.unpack(head)[0]))
        job = source.read(_LENGTH.unpack(source.read(_LENGTH.size))[0])
        _limit(seconds, memory)
        answer = json.dumps({**_render(environment, job, longest), "job": number}).encode()
        target.write(_LENGTH.pack(len(answer)) + answer)
        target.flush()


def _limit(seconds: float, memory: int) -> None:
    """Should the parent be gone, nobody kills this process: the system ends it."""
    try:
        import resource
    except ImportError:  # not a Unix system: the parent's clock and MAX_RENDERED remain
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _render(environment: Any, job: bytes, longest: int) -> dict[str, str]:
    from jinja2 import meta

    try:
        template, variables = json.loads(job)
        if variables is None:
            return {"text": json.dumps(sorted(meta.find_undeclared_variables(environment.parse(template))))}
        parts, length = [], 0
        for part in environment.from_string(template).generate(**variables):
            length += len(part)
            if length > longest:
                return {"error": f"it writes more than {longest} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # whatever the template does wrong is its own
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _environment() -> Any:
    """The sandbox, with what templates written for transformers expect of it."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} marks what the assistant wrote, for training: here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own way)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    class Names(jinja2.utils.Namespace):
        """Without names that could stand for Python's own attributes."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                Names._check(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            Names._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if not isinstance(name, str) or name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=Names, dict=_Dict()
    )
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """Python's dict, with one of its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
