"""`quire serve`: from options to a running server, and to its orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from quire.config import ServerConfig
from quire.demo import ADAPTERS, adapter_path
from quire.errors import QuireError
from quire.platform.arguments import engine_config, recommended_sampling
from quire.platform.async_engine import AsyncEngine
from quire.platform.loading import resolve_adapter
from quire.platform.sampling_params import SamplingParams
from quire.server.api.app import create_app
from quire.server.api.logs import configure
from quire.server.api.metrics import Metrics
from quire.server.api.protocol import limited_protocol
from quire.server.cores import use_share

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
    """What the options ask for. engine: arguments of `LLM`; server: fields of `ServerConfig`."""

    engine: Mapping[str, Any]
    server: Mapping[str, Any]
    modules: Sequence[str] = ()
    generation_config: str = "auto"
    chat_template: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    access_log: bool = True
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)


def serve(task: Task) -> int:
    """Load, serve until a signal comes, and end in order. Returns the exit code; raises QuireError."""
    begun = time.monotonic()
    configure(task.log_format == "json", task.log_level)
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
    config = engine_config(
        **{
            **task.engine,
            "enable_lora": bool(modules) or task.engine.get("enable_lora") or None,
            "lora_roots": _readable(modules, roots) if roots or task.server.get("allow_runtime_lora") else None,
        }
    )
    server = ServerConfig(**{**task.server, "lora_roots": roots, "chat_template": _template(task.chat_template)})
    _check_address(server)
    metrics = Metrics()
    engine = AsyncEngine(config, metrics.on_step)
    recommended = recommended_sampling(engine.core.path) if task.generation_config == "auto" else {}
    sampling = {**recommended, **task.override_generation_config}
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
    return _run(_Server(_uvicorn_config(app, server), engine, server), engine)


def _readable(modules: Sequence[Module], roots: tuple[str, ...]) -> tuple[str, ...]:
    """The folders that the engine may read adapters from: the roots, and what was named at the start."""
    folders = list(roots)
    for module in modules:
        folder = resolve_adapter(module.path, engine_config(enable_lora=True).lora)
        folders.append(str(folder.resolve()))
        # A snapshot of the hub's is a folder of links.
        folders += {str(file.resolve().parent) for file in folder.glob("adapter_*")}
    return tuple(dict.fromkeys(folders))


def _template(given: str | None) -> str | None:
    """A file's text, or the text itself where it is a template on the command line."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"--chat-template {given}: cannot be read ({error}).") from None


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**sampling)
    except TypeError as error:
        raise QuireError(f"--override-generation-config: {error}") from None


def _check_address(config: ServerConfig) -> None:
    """Before the model is loaded."""
    if config.uds is not None or config.port == 0:
        return
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except (OSError, OverflowError) as error:
        raise QuireError(f"{config.host}:{config.port} cannot be listened on ({error}): take another --port.") from None


def _uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        uds=config.uds,
        http=limited_protocol(config.header_timeout),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        timeout_graceful_shutdown=int(config.shutdown_timeout) + _LINGER,
    )


class _Server(uvicorn.Server):
    """Ends with the engine, and lets it finish what runs when a signal comes; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, settings: ServerConfig) -> None:
        super().__init__(config)
        self._engine = engine
        self._settings = settings

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(1)  # not even a step that sticks holds it
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._engine.failed:
            return True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logger.info("listening on %s", self._address())

    def _address(self) -> str:
        if self._settings.uds is not None:
            return f"unix:{self._settings.uds}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http{'s' * (self._settings.ssl_keyfile is not None)}://{f'[{host}]' if ':' in host else host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("shutting down: %s", self._waits_for())
        draining = asyncio.ensure_future(self._engine.close(self._settings.shutdown_timeout))
        await super().shutdown(sockets)
        await asyncio.gather(draining, return_exceptions=True)
        logger.info("ended")

    def _waits_for(self) -> str:
        running = self._engine.num_requests
        if not running:
            return "no request runs"
        return (
            f"{running} request{'s' * (running != 1)} may finish for up to {self._settings.shutdown_timeout:g} s; "
            "a second Ctrl-C (or SIGTERM) ends the server at once"
        )


def _run(server: _Server, engine: AsyncEngine) -> int:
    asyncio.run(server.serve())
    code = 1 if engine.failed or not server.started else 0
    if engine.stuck:  # its thread would hold the process
        logger.error("a step does not end: the server ends without it")
        logging.shutdown()
        os._exit(1)
    return code
