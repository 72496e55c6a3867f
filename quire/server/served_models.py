"""What clients can name in `model`: the base model, its adapters, and mixtures of these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quire.config import ServerConfig
from quire.errors import AdapterError, QuireError, UnknownAdapterError
from quire.lora import AdapterInfo, LoadReport, LoRARequest, StagedAdapter, name_fault
from quire.platform.engine.async_engine import AsyncEngine
from quire.server.adapter_resolver import AdapterResolver
from quire.server.adapter_sources import AdapterSources
from quire.server.responses.errors import ApiError, as_api_error, no_model
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.uploads.store import AdapterStore, Upload

# Waits until requests may run with these adapters, where others change them too (replicas). Raises ApiError.
Gate = Callable[[frozenset[str]], Awaitable[None]]

_OWNER = "quire"
_UPLOAD = "upload"  # what the folder of an uploaded adapter is called, to those who ask


@dataclass(frozen=True)
class StagedModel:
    """What a name may come to stand for: an adapter that was read, or a mixture. body: who asked for it."""

    body: LoadAdapterRequest
    what: StagedAdapter | LoRARequest


class ServedModels:
    """The table of names. Adapters are the engine's; mixtures are names of the server's for requests to it."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, store: AdapterStore | None) -> None:
        """store: for adapters that are uploaded."""
        self._engine = engine
        self._config = config
        self._store = store
        self._created = int(time.time())
        self._mixtures: dict[str, LoRARequest] = {}
        self.gate: Gate | None = None
        self._parents: dict[str, str] = {}  # adapter -> the name of the base model that its loader gave
        root = engine.llm_engine.config.model.model
        self._root = root or "quire-demo"
        self.names = config.served_model_names or (self._root,)
        lora = engine.llm_engine.config.lora
        self._places = AdapterSources(config, min(lora.host_bytes, lora.device_bytes), engine.llm_engine.config.model)
        self._resolver: AdapterResolver | None = None
        if lora.enabled and config.allow_runtime_lora and config.lora_resolver:
            self._resolver = AdapterResolver(engine, self._places, self._is_part)

    async def pass_gate(self, model: str | None) -> None:
        """Wait until requests may run with what a name stands for. Before it is looked up. Raises ApiError."""
        if self.gate is not None and model is not None and model not in self.names:
            await self.gate(frozenset({model, *self._parts(model)}))

    async def resolve(self, model: str | None) -> LoRARequest | None:
        """As `find`; an adapter that is not loaded is looked for where adapters may come from, and loaded."""
        try:
            found = self.find(model)
        except ApiError:
            if model is None or self._resolver is None:
                raise
            with self._hiding():
                await self._resolver.load(model)
            return self.find(model)
        if model is not None and self._resolver is not None:
            self._resolver.used(model)
        return found

    def _parts(self, model: str) -> Iterable[str]:
        """The adapters that a mixture needs; none for other names."""
        mixture = self._mixtures.get(model)
        return dict(mixture.adapters or ()) if mixture is not None else ()

    def _is_part(self, name: str) -> bool:
        """Whether a mixture needs an adapter."""
        return any(name in dict(parts.adapters or ()) for parts in self._mixtures.values())

    def find(self, model: str | None) -> LoRARequest | None:
        """What a request runs with; None: the base model. Raises ApiError 404."""
        if model is None or model in self.names:
            return None
        if model in self._mixtures:
            return self._mixtures[model]
        adapters = self._engine.llm_engine.adapters
        if adapters is not None and adapters.knows(model):
            return LoRARequest(model)
        raise no_model(model)

    def has(self, name: str) -> bool:
        """Whether an adapter or a mixture has this name."""
        adapters = self._engine.llm_engine.adapters
        return name in self._mixtures or (adapters is not None and adapters.knows(name))

    def is_mixture(self, name: str) -> bool:
        return name in self._mixtures

    def name_of(self, model: str | None) -> str:
        return self.names[0] if model is None else model

    def models(self) -> list[dict[str, Any]]:
        """OpenAI's model objects, with vLLM's `root`, `parent` and `max_model_len`."""
        listed = [self._model(name, self._root, None) for name in self.names]
        for info in self._engine.list_lora_adapters():
            parent = self._parents.get(info.name, self.names[0])
            shown = replace(info, path=_UPLOAD) if self._is_uploaded(info) else info
            listed.append({**self._model(info.name, shown.path, parent), "adapter": asdict(shown)})
        for name, mixture in self._mixtures.items():
            parts = [{"name": part, "weight": weight} for part, weight in mixture.adapters or ()]
            listed.append({**self._model(name, "", self.names[0]), "root": None, "adapters": parts})
        return listed

    def _model(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": _OWNER,
            "root": root,
            "parent": parent,
            "max_model_len": self._engine.llm_engine.limits.max_model_len,
        }

    def adapters(self) -> dict[str, Any]:
        """Adapters and mixtures with all that is known of them, and what an upload may be."""
        lora = self._engine.llm_engine.lora
        loaded = lora.loaded() if lora.registry is not None else []
        store = self._store if lora.registry is not None else None
        limits = {"max_bytes": 0, "stored_bytes": 0, "store_bytes": 0}
        if store is not None:
            limits = {"max_bytes": store.upload_bytes, "stored_bytes": store.bytes, "store_bytes": store.total_bytes}
        return {
            "object": "list",
            "data": [self._described(info, report) for info, report in loaded],
            "mixtures": [
                {
                    "name": name,
                    "adapters": [{"name": part, "weight": weight} for part, weight in mixture.adapters or ()],
                }
                for name, mixture in self._mixtures.items()
            ],
            "runtime_changes": self._config.allow_runtime_lora and lora.registry is not None,
            "uploads": limits,
        }

    def _described(self, info: AdapterInfo, report: LoadReport) -> dict[str, Any]:
        return {
            "name": info.name,
            "source": _UPLOAD if self._is_uploaded(info) else Path(info.path).name,
            "parent": self._parents.get(info.name, self.names[0]),
            "tier": info.tier,
            "bytes": info.bytes,
            "requests": info.requests,
            "pinned": info.pinned,
            "lora_int_id": info.lora_int_id,
            "rank": max(report.ranks, default=None),
            "alpha": report.alphas[0] if len(report.alphas) == 1 else None,
            "scaling": report.scalings[0] if len(report.scalings) == 1 else None,
            "base_model_name_or_path": report.base_model,
            "report": asdict(report),
        }

    def _is_uploaded(self, info: AdapterInfo) -> bool:
        return self._store is not None and self._store.has(info.path)

    def store(self) -> AdapterStore:
        """Where uploads go. Raises ApiError where there is no use for them."""
        if self._store is None or self._engine.llm_engine.adapters is None:
            raise ApiError(400, "adapters are not served: start the server with --enable-lora.")
        return self._store

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        """Around what loads: whoever was faster by the same name may have been an upload."""
        try:
            yield
        except (AdapterError, ApiError) as error:
            told = as_api_error(error)
            message = told.message if self._store is None else self._store.hide(told.message)
            raise ApiError(told.status, message, told.param, told.code, told.headers) from None

    # -- changes --------------------------------------------------------------------------------------------------

    async def load(self, body: LoadAdapterRequest) -> dict[str, Any]:
        """Load an adapter from under the allowed folders, or name a mixture. Raises ApiError."""
        return self.publish(await self.stage(body))

    async def stage(self, body: LoadAdapterRequest) -> StagedModel:
        """Read and check what a name may come to stand for. Raises ApiError."""
        if (body.lora_path is None) == (body.adapters is None):
            raise ApiError(400, "lora_path: give the adapter's folder here, or a mixture in adapters.", "lora_path")
        self._check_name(body)
        if body.adapters is not None:
            return StagedModel(body, self._mixture(body))
        assert body.lora_path is not None
        folder = await asyncio.to_thread(self._places.folder, body.lora_path)
        with self._hiding():
            return StagedModel(body, await self._engine.loading.stage(body.lora_name, str(folder), body.load_inplace))

    def publish(self, staged: StagedModel) -> dict[str, Any]:
        """Let a name stand for what was staged. Raises ApiError where that does not go any more."""
        body, what = staged.body, staged.what
        if isinstance(what, StagedAdapter):
            with self._hiding():
                return self._took(body, self._engine.loading.publish(what))
        self._mixtures[body.lora_name] = what
        self._name_parent(body)
        return {"name": body.lora_name, "adapters": [part.model_dump() for part in body.adapters or ()]}

    async def load_uploaded(self, body: LoadAdapterRequest, upload: Upload) -> dict[str, Any]:
        """Load what has come; its folder lives as long as the version does that is made of it. Raises ApiError; then
        the folder goes.
        """
        self._check_name(body)
        upload.hand_over()
        try:
            with self._hiding():
                name, path = body.lora_name, str(upload.folder)
                report = await self._engine.load_lora_adapter(name, path, body.load_inplace, gone=upload.remove)
        except BaseException:
            await asyncio.wrap_future(upload.remove())
            raise
        return self._took(body, report)

    def _took(self, body: LoadAdapterRequest, report: LoadReport) -> dict[str, Any]:
        self._mixtures.pop(body.lora_name, None)
        self._name_parent(body)
        return asdict(report)

    def _check_name(self, body: LoadAdapterRequest) -> None:
        if body.base_model_name is not None and body.base_model_name not in self.names:
            raise ApiError(
                404, f"base_model_name: {body.base_model_name[:200]!r} is not served here.", "base_model_name"
            )
        if fault := name_fault(body.lora_name):
            raise ApiError(400, f"lora_name: {body.lora_name[:200]!r}: {fault}.", "lora_name")
        if body.lora_name in self.names:
            raise ApiError(400, f"lora_name: {body.lora_name!r} is the base model's.", "lora_name")
        adapters = self._engine.llm_engine.adapters
        if adapters is None:
            raise ApiError(400, "adapters are not served: start the server with --enable-lora.")
        if not body.load_inplace and (body.lora_name in self._mixtures or adapters.knows(body.lora_name)):
            raise ApiError(
                400, f"lora_name: {body.lora_name!r} is loaded already; load_inplace replaces it.", "lora_name"
            )

    def _mixture(self, body: LoadAdapterRequest) -> LoRARequest:
        adapters = self._engine.llm_engine.adapters
        assert adapters is not None and body.adapters is not None
        if adapters.knows(body.lora_name):
            raise ApiError(400, f"lora_name: {body.lora_name!r} is an adapter: unload it first.", "lora_name")
        try:
            mixture = LoRARequest(body.lora_name, adapters=[(part.name, part.weight) for part in body.adapters])
            self._engine.llm_engine.lora.check_mixture(mixture)
        except QuireError as error:
            raise ApiError(400, f"adapters: {error}", "adapters") from None
        return mixture

    def _check_number(self, body: UnloadAdapterRequest) -> None:
        """vLLM's clients may name an adapter by its number too."""
        if body.lora_int_id is None:
            return
        numbers = [one.lora_int_id for one in self._engine.list_lora_adapters() if one.name == body.lora_name]
        if body.lora_int_id not in numbers:
            raise ApiError(400, f"lora_int_id: {body.lora_int_id} is not that adapter's number.", "lora_int_id")

    def adopt(self, name: str, base_model: str | None) -> None:
        """Take in an adapter that is loaded at the start. Raises QuireError."""
        if base_model is not None and base_model not in self.names:
            raise QuireError(f"adapter {name!r} is for {base_model!r}, and that is not served here.")
        if base_model is not None:
            self._parents[name] = base_model

    def _name_parent(self, body: LoadAdapterRequest) -> None:
        if body.base_model_name is not None:
            self._parents[body.lora_name] = body.base_model_name

    async def unload(self, body: UnloadAdapterRequest) -> dict[str, Any]:
        """Forget an adapter or a mixture; of an adapter, wait for the requests that hold it, and tell its bytes.

        Raises ApiError 404, and 400 for an adapter that a mixture needs.
        """
        name = body.lora_name
        self.check_unload(body)
        if self._mixtures.pop(name, None) is not None:
            return {"name": name, "freed_bytes": 0, "draining": False}
        self._parents.pop(name, None)
        try:
            freed = await self._engine.unload_lora_adapter(name, self._config.unload_timeout)
        except UnknownAdapterError:  # somebody else was faster
            raise _gone(name) from None
        if self._store is not None:
            await self._store.idle()
        return {"name": name, "freed_bytes": freed, "draining": freed is None}

    def check_unload(self, body: UnloadAdapterRequest) -> None:
        """Whether `unload` would do it. Raises ApiError."""
        name = body.lora_name
        if name in self._mixtures:
            return
        adapters = self._engine.llm_engine.adapters
        if adapters is None or not adapters.knows(name):
            raise _gone(name)
        self._check_number(body)
        needed = [mixture for mixture, parts in self._mixtures.items() if name in dict(parts.adapters or ())]
        if needed:
            raise ApiError(400, f"lora_name: the mixture {needed[0]!r} needs it: unload that first.", "lora_name")


def _gone(name: str) -> ApiError:
    return ApiError(404, f"lora_name: no adapter {name[:200]!r} is loaded.", "lora_name", "model_not_found")
