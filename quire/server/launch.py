"""`quire serve`: from options to a running server, and to its orderly end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi import FastAPI

from quire.config import (
    EngineConfig,
    LaunchConfig,
    LoRAConfig,
    ModelConfig,
    RequestDefaults,
    ServerConfig,
    from_vllm,
)
from quire.config.arguments import engine_config
from quire.config.generation import default_sampling
from quire.config.settings import engine_settings, make
from quire.demo import ADAPTERS, adapter_path
from quire.errors import QuireError
from quire.lora import name_fault
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.engine.builder import resolve_adapter
from quire.platform.sampling.params import SamplingParams
from quire.server.app import create_app
from quire.server.cores import use_share
from quire.server.http.server import HttpServer, tls
from quire.server.logs import configure
from quire.server.metrics import Metrics
from quire.server.runners import about
from quire.server.uploads.store import AdapterStore, adapter_store

logger = logging.getLogger("quire.server")

# Of RequestDefaults: what routes need of it.
_OF_CHAT = ("chat_template", "tool_call_parser", "reasoning_parser", "tool_strict")
_LINGER = 5  # seconds beyond shutdown_timeout for connections to close


@dataclass(frozen=True)
class Module:
    """An adapter to be loaded at the start. base_model: the served name that it says it belongs to."""

    name: str
    path: str
    base_model: str | None = None

    @classmethod
    def parse(cls, text: str) -> Module:
        """name=path, or JSON with name, path and perhaps base_model_name. Raises QuireError."""
        name, equals, path = text.partition("=")
        if not text.lstrip().startswith("{"):
            if not (name and equals and path):
                raise QuireError(f"--lora-modules {text!r}: give name=path, or JSON with name and path.")
            return cls(name, path)._checked()
        try:
            given = json.loads(text)
            unknown = set(given) - {"name", "path", "base_model_name"}
            if unknown:
                raise QuireError(f"--lora-modules {text!r}: there is no {sorted(unknown)[0]!r}.")
            return cls(str(given["name"]), str(given["path"]), given.get("base_model_name"))._checked()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, QuireError):
                raise
            raise QuireError(f"--lora-modules {text!r}: must be JSON with name and path.") from None

    def _checked(self) -> Module:
        if fault := name_fault(self.name):
            raise QuireError(f"--lora-modules: the name {self.name!r:.200}: {fault}.")
        return self


@dataclass(frozen=True)
class Task:
    """What the options ask for.

    settings: by their names in the table of settings; vllm: of vLLM's options those that quire does not have, and that
    ask for nothing else than what is done.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> dict[str, Any]:
        """Those of the settings that an engine is made with."""
        return {row.name: self.settings[row.name] for row in engine_settings() if row.name in self.settings}


@dataclass(frozen=True)
class Service:
    """What is loaded: the application with its routes, the engine behind it, and the settings of both."""

    app: FastAPI
    engine: AsyncEngine
    config: ServerConfig


def serve(task: Task) -> int:
    """Load, serve until a signal comes, and end in order. Returns the exit code; raises QuireError."""
    _check_address(make(ServerConfig, task.settings))
    service = load(task)
    return _run(HttpServer(service.app, service.config), service.engine, service.config)


def load(task: Task, uploads: bool = True) -> Service:
    """The application that options ask for, and the engine, which has not begun to step. uploads: adapters may be
    uploaded, where they are changed at all. Raises QuireError."""
    begun = time.monotonic()
    launch = make(LaunchConfig, task.settings)
    configure(launch.log_format == "json", launch.log_level, launch.uvicorn_log_level)
    if line := from_vllm.take("serve", task.vllm):
        logger.info(line)
    threads = use_share()
    if threads is not None:
        logger.info("%d threads compute: as many as there are cores for this process", threads)
    modules = _modules(launch, task.settings)
    requests = make(RequestDefaults, task.settings)
    server = make(ServerConfig, task.settings)
    store = adapter_store(server) if uploads else None
    config = _engine_config(task, modules, store)
    server = replace(server, **{name: getattr(requests, name) for name in _OF_CHAT})
    metrics = Metrics()
    engine = AsyncEngine(config, metrics.on_step)
    sampling = default_sampling(engine.llm_engine.path, requests)
    server = replace(server, default_sampling=sampling)
    _check_sampling(sampling)
    app = create_app(engine, server, metrics, store, not launch.disable_access_log)
    served = app.state.context.served
    for module in modules:
        if module.name in served.names:
            raise QuireError(f"--lora-modules {module.name}: that is the base model's name.")
        served.adopt(module.name, module.base_model)
        engine.llm_engine.load_lora_adapter(module.name, module.path)
    names = ", ".join([served.names[0], *(module.name for module in modules)])
    logger.info("%s ready in %.1f s", names, time.monotonic() - begun)
    if engine.llm_engine.pooling is not None:
        logger.info("this server %s", about(engine.llm_engine.pooling))
    return Service(app, engine, server)


def _modules(launch: LaunchConfig, settings: Mapping[str, Any]) -> list[Module]:
    """The adapters that are loaded at the start: where they are on this machine."""
    modules = [Module.parse(text) for text in launch.modules]
    # The bundled model comes with its adapters.
    if settings.get("model") is None and settings.get("enable_lora") is not False:
        modules += [Module(name, str(adapter_path(name))) for name in ADAPTERS if name not in {m.name for m in modules}]
    if modules and settings.get("enable_lora") is False:
        raise QuireError("--lora-modules needs --enable-lora.")
    return _found(modules, _hub(settings))


def _engine_config(task: Task, modules: Sequence[Module], store: AdapterStore | None) -> EngineConfig:
    """With LoRA where there are adapters; where more may be loaded over HTTP, they come from these folders alone."""
    settings, given = task.settings, task.engine
    if modules:
        given["enable_lora"] = True
    roots = tuple(settings.get("lora_root") or ()) + (() if store is None else (str(store.folder),))
    from_hub = settings.get("lora_hub")
    if roots or from_hub or settings.get("allow_runtime_lora"):
        given["lora_roots"] = _readable(modules, roots, _hub(settings) if from_hub else None)
    return engine_config(**given)


def _hub(settings: Mapping[str, Any]) -> ModelConfig:
    """How files come from the hub."""
    return engine_config(download_dir=settings.get("download_dir"), hf_token=settings.get("hf_token")).model


def _found(modules: Sequence[Module], hub: ModelConfig) -> list[Module]:
    """Where they are: the hub's in its cache. hub: says how files come from there."""
    anywhere = LoRAConfig(enabled=True)
    return [replace(module, path=str(resolve_adapter(module.path, anywhere, hub))) for module in modules]


def _readable(modules: Sequence[Module], roots: tuple[str, ...], hub: ModelConfig | None) -> tuple[str, ...]:
    """The folders that the engine may read adapters from: the roots, what was named at the start, and what comes from
    the hub, where anything may.
    """
    folders = list(roots)
    if hub is not None:
        import huggingface_hub

        folders.append(hub.download_dir or huggingface_hub.constants.HF_HUB_CACHE)
    for module in modules:
        folder = Path(module.path)
        folders.append(str(folder.resolve()))
        # A snapshot of the hub's is a folder of links.
        folders += {str(file.resolve().parent) for file in folder.glob("adapter_*")}
    return tuple(dict.fromkeys(folders))


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**sampling)
    except TypeError as error:
        raise QuireError(f"--override-generation-config: {error}") from None


def _check_address(config: ServerConfig) -> None:
    """Before the model is loaded."""
    tls(config)
    if config.uds is not None or config.port == 0:
        return
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except (OSError, OverflowError) as error:
        raise QuireError(f"{config.host}:{config.port} cannot be listened on ({error}): take another --port.") from None


class _Signals:
    """The first of them ends the server in order, a second one at once: not even a step that sticks holds it."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            os._exit(1)
        self._came = True
        self._server.end()


async def _serve(server: HttpServer, engine: AsyncEngine, settings: ServerConfig) -> None:
    """From the first connection to the last; lets what runs finish when a signal comes."""
    on_signal = _Signals(server)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    await server.start()
    logger.info("listening on %s", server.address)
    await server.wait(lambda: engine.step_loop.failed)
    logger.info("shutting down: %s", _waits_for(engine.num_requests, settings.shutdown_timeout))
    draining = asyncio.ensure_future(engine.close(settings.shutdown_timeout))
    await server.stop(settings.shutdown_timeout + _LINGER)
    await asyncio.gather(draining, return_exceptions=True)
    logger.info("ended")


def _waits_for(running: int, seconds: float) -> str:
    if not running:
        return "no request runs"
    return (
        f"{running} request{'s' * (running != 1)} may finish for up to {seconds:g} s; "
        "a second Ctrl-C (or SIGTERM) ends the server at once"
    )


def _run(server: HttpServer, engine: AsyncEngine, settings: ServerConfig) -> int:
    gc.freeze()  # what is loaded stays: looking through it for garbage stops everything for a third of a second
    asyncio.run(_serve(server, engine, settings))
    code = 1 if engine.step_loop.failed else 0
    if engine.step_loop.stuck:  # its thread would hold the process
        logger.error("a step does not end: the server ends without it")
        logging.shutdown()
        os._exit(1)
    if engine.llm_engine.lora.lingers:
        logging.shutdown()
        os._exit(code)
    return code
