"""Where adapters may come from that clients name: folders under --lora-root, and the hub where --lora-hub allows it."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from quire.config import ModelConfig, ServerConfig
from quire.errors import AdapterError, OutsideRootsError
from quire.lora import CONFIG_FILE
from quire.lora.gguf import is_gguf
from quire.lora.memory import allowed_folder
from quire.platform.engine.builder import NotOnHubError, fetch_adapter
from quire.server.responses.errors import ApiError

logger = logging.getLogger("quire.server")

# A name, or names with slashes between: no way out of a folder can be written so, nor a hidden one.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}(?:/[A-Za-z0-9][\w.-]{0,127}){0,2}", re.ASCII)
_HUB_NAME = re.compile(r"[^/]+/[^/]+")


class AdapterSources:
    """Any thread may call this; it reads the disk, and may wait for the hub."""

    def __init__(self, config: ServerConfig, most_bytes: int, model: ModelConfig) -> None:
        """most_bytes: of an adapter of the hub's. model: says how files come from there."""
        self._model = model
        self._roots = config.lora_roots
        self._hub = config.lora_hub
        self._most_bytes = most_bytes

    def may_have(self, name: str) -> bool:
        """Whether looking for an adapter of this name makes sense at all; without looking."""
        return bool(_NAME.fullmatch(name)) and (bool(self._roots) or self._is_allowed(name))

    def find(self, name: str) -> Path | None:
        """The folder of the adapter of this name: under a root, or the hub's; None: there is none. Raises AdapterError
        for one of the hub's that is not to be fetched.
        """
        if not self.may_have(name):
            return None
        for root in self._roots:
            try:
                folder = allowed_folder(Path(root).expanduser() / name, self._roots)
            except AdapterError:  # not there; or a link that leads away, of which nothing is told
                continue
            if is_gguf(folder) or (folder / CONFIG_FILE).is_file():
                return folder
        if not self._is_allowed(name):
            return None
        try:
            return fetch_adapter(name, self._most_bytes, self._model)
        except NotOnHubError as error:
            logger.info("%s", error)
            return None

    def folder(self, path: str) -> Path:
        """What a client calls an adapter's path: an absolute one, or a name to `find`. Raises ApiError: 403 outside the
        allowed folders, 404 for none.
        """
        if not self._roots and not self._hub:
            raise ApiError(
                403, "lora_path: no folder may be read; start the server with --lora-root FOLDER.", "lora_path"
            )
        try:
            if os.path.isabs(path):
                return allowed_folder(Path(path), self._roots)
            if not _NAME.fullmatch(path):
                raise ApiError(
                    400,
                    "lora_path: must be an absolute path under one of the --lora-root folders, a name relative to one, "
                    "or a hub id.",
                    "lora_path",
                )
            found = self.find(path)
        except AdapterError as error:
            status = 403 if isinstance(error, OutsideRootsError) else 404
            raise ApiError(status, f"lora_path: {error}", "lora_path") from None
        if found is None:
            hub = "nor has the hub" if self._is_allowed(path) else "and --lora-hub does not name it"
            raise ApiError(404, f"lora_path: no --lora-root folder has an adapter {path!r}, {hub}.", "lora_path")
        return found

    def _is_allowed(self, name: str) -> bool:
        """On the hub: all, all of an owner, or one."""
        return bool(_HUB_NAME.fullmatch(name)) and any(
            allowed in ("*", name, name.partition("/")[0]) for allowed in self._hub
        )
