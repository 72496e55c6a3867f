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

from quire.config import LoRAConfig, ModelConfig, ServerConfig, from_vllm
from quire.config.arguments import check_generation_config, default_sampling, engine_config, load_chat_template
from quire.demo import ADAPTERS, adapter_path
from quire.errors import QuireError
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.engine.builder import resolve_adapter
from quire.platform.sampling.params import SamplingParams
from quire.server.app import create_app
from quire.server.cores import use_share
from quire.server.http.server import HttpServer, tls
from quire.server.logs import configure
from quire.server.metrics import Metrics

logger = logging.getLogger("quire.server")

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
            return cls(name, path)
        try:
            given = json.loads(text)
            unknown = set(given) - {"name", "path", "base_model_name"}
            if unknown:
                raise QuireError(f"--lora-modules {text!r}: there is no {sorted(unknown)[0]!r}.")
            return cls(str(given["name"]), str(given["path"]), given.get("base_model_name"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, QuireError):
                raise
            raise QuireError(f"--lora-modules {text!r}: must be JSON with name and path.") from None


@dataclass(frozen=True)
class Task:
    """What the options ask for.

    engine: arguments of `LLM`; server: fields of `ServerConfig`; vllm: of its options those that quire does not have,
    and that ask for nothing else than what is done.
    """

    engine: Mapping[str, Any]
    server: Mapping[str, Any]
    modules: Sequence[str] = ()
    generation_config: str = "auto"
    chat_template: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    access_log: bool = True
    uvicorn_log_level: str | None = None
    vllm: Mapping[str, Any] = field(default_factory=dict)
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)


def serve(task: Task) -> int:
    """Load, serve until a signal comes, and end in order. Returns the exit code; raises QuireError."""
    begun = time.monotonic()
    configure(task.log_format == "json", task.log_level, task.uvicorn_log_level)
    if line := from_vllm.take("serve", task.vllm):
        logger.info(line)
    threads = use_share()
    if threads is not None:
        logger.info("%d threads compute: as many as there are cores for this process", threads)
    modules = [Module.parse(text) for text in task.modules]
    # The bundled model comes with its adapters.
    if task.engine.get("model") is None and task.engine.get("enable_lora") is not False:
        modules += [Module(name, str(adapter_path(name))) for name in ADAPTERS if name not in {m.name for m in modules}]
    if modules and task.engine.get("enable_lora") is False:
        raise QuireError("--lora-modules needs --enable-lora.")
    roots = tuple(str(root) for root in task.server.get("lora_roots") or ())
    hub = engine_config(**{name: task.engine.get(name) for name in ("download_dir", "hf_token")}).model
    modules = _found(modules, hub)
    check_generation_config(task.generation_config)
    allowed = roots or task.server.get("lora_hub") or task.server.get("allow_runtime_lora")
    config = engine_config(
        **{
            **task.engine,
            "enable_lora": bool(modules) or task.engine.get("enable_lora") or None,
            "lora_roots": _readable(modules, roots, hub if task.server.get("lora_hub") else None) if allowed else None,
        }
    )
    server = ServerConfig(
        **{**task.server, "lora_roots": roots, "chat_template": load_chat_template(task.chat_template)}
    )
    _check_address(server)
    metrics = Metrics()
    engine = AsyncEngine(config, metrics.on_step)
    sampling = default_sampling(engine.core.path, task.generation_config, task.override_generation_config)
    server = replace(server, default_sampling=sampling)
    _check_sampling(sampling)
    app = create_app(engine, server, metrics, task.access_log)
    served = app.state.context.served
    for module in modules:
        if module.name in served.names:
            raise QuireError(f"--lora-modules {module.name}: that is the base model's name.")
        served.adopt(module.name, module.base_model)
        engine.core.load_lora_adapter(module.name, module.path)
    names = ", ".join([served.names[0], *(module.name for module in modules)])
    logger.info("%s ready in %.1f s", names, time.monotonic() - begun)
    return _run(HttpServer(app, server), engine, server)


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
    await server.wait(lambda: engine.failed)
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
    code = 1 if engine.failed else 0
    if engine.stuck:  # its thread would hold the process
        logger.error("a step does not end: the server ends without it")
        logging.shutdown()
        os._exit(1)
    return code
