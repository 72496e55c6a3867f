"""Logits processors that are not quire's own: named by whoever starts the engine, and imported then."""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError, RequestError
from quire.platform.sampling.logits_processors.base import LogitsProcessor, ProcessorRequest
from quire.platform.sampling.logits_processors.chain import Link
from quire.platform.sampling.params import SamplingParams
from quire.plugins import PluginGroup

GROUP = PluginGroup("quire.logits_processors", "logits_processors", "module:Class", "logits processors")

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class Plugin:
    """A class that was named. name: as it was. check: its rows are compared with those of one made anew."""

    name: str
    kind: type[LogitsProcessor]
    check: bool = False

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request needs one. Raises RuntimeError for its own faults."""
        try:
            return bool(self.kind.applies_to(params))
        except Exception as error:
            raise self._fault(error) from error

    def link(self, request: ProcessorRequest) -> Link:
        """One for a request. Raises RequestError for arguments that it refuses, and RuntimeError for its own faults."""
        try:
            processor = self.kind(request)
        except ValueError as error:
            raise RequestError(f"logits processor {self.name}: {error}") from error
        except Exception as error:
            raise self._fault(error) from error
        return PluginLink(processor, self.name, self.check)

    def _fault(self, error: Exception) -> RuntimeError:
        logger.error("logits processor %s fails", self.name, exc_info=error)
        return RuntimeError(f"logits processor {self.name} fails: {type(error).__name__}: {error}")


class PluginLink(Link):
    """A plug-in's link. What cannot be pickled, or be read again, fails where it is used: its request ends, and no
    other."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        try:
            return _read, (pickle.dumps(self.processor), self.plugin, self.check)
        except Exception as error:
            return PluginLink, (Broken(f"it cannot be sent to another process: {error}"), self.plugin)


class Broken(LogitsProcessor):
    """Stands for a processor that was lost on its way."""

    def __init__(self, why: str) -> None:
        self.why = why

    def fork(self) -> Broken:
        """Raises RuntimeError, and says why."""
        raise RuntimeError(self.why)


def _read(data: bytes, plugin: str, check: bool) -> Link:
    try:
        return PluginLink(pickle.loads(data), plugin, check)
    except Exception as error:
        return PluginLink(Broken(f"it cannot be read in another process: {type(error).__name__}: {error}"), plugin)


def load_plugins(names: Sequence[str | type], check: bool = False) -> tuple[Plugin, ...]:
    """The classes that are named, or given, in this order. check: for debug runs.

    Raises QuireError for what cannot be found or imported, is no LogitsProcessor, or is named twice.
    """
    plugins: list[Plugin] = []
    for name in names:
        plugin = _plugin(name, check)
        if any(plugin.kind is other.kind for other in plugins):
            raise QuireError(f"logits_processors: {plugin.name!r} is named twice; take one of them out.")
        plugins.append(plugin)
    return tuple(plugins)


def _plugin(name: str | type, check: bool) -> Plugin:
    if isinstance(name, str):
        title, kind = name, GROUP.load(name)
    else:
        title, kind = getattr(name, "__qualname__", repr(name)), name
    if not (isinstance(kind, type) and issubclass(kind, LogitsProcessor)):
        raise QuireError(
            f"logits_processors: {title!r} is not a class derived from quire.LogitsProcessor, but {kind!r}; see "
            "docs/logits-processors.md."
        )
    if inspect.isabstract(kind):
        raise QuireError(f"logits_processors: {title!r} has abstract methods, so that none can be made.")
    if isinstance(kind.arguments, str):
        raise QuireError(f"logits_processors: {title!r}: arguments is a tuple of names, not {kind.arguments!r}.")
    return Plugin(title, kind, check)


def check_arguments(params: SamplingParams, plugins: Sequence[Plugin]) -> None:
    """Raises RequestError for a name in `extra_args` that no processor takes."""
    taken = {name for plugin in plugins for name in plugin.kind.arguments}
    unknown = sorted(set(params.extra_args or ()) - taken)
    if unknown:
        known = f"this engine's take {', '.join(sorted(taken))}" if taken else "this engine has none"
        raise RequestError(
            f"extra_args (vllm_xargs): no logits processor takes {unknown[0]!r}; {known}. They are named when it is "
            f"started, by logits_processors=[...] or --logits-processors{GROUP.told_installed()}."
        )


def check_beams(plugins: Sequence[Plugin]) -> None:
    """Raises RequestError for a beam search where a processor is for every request: beams are not sampled."""
    for plugin in plugins:
        if not plugin.kind.arguments:
            raise RequestError(
                f"beam search is refused: it ranks the model's own logprobs, and the logits processor {plugin.name} of "
                "this engine is for every request. Use sampling, or an engine without it."
            )
