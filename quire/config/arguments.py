"""Arguments by their names -> configurations; and the signature and the help of who takes them."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config import from_vllm
from quire.config.engine import EngineConfig
from quire.config.setting import Setting
from quire.config.settings import ENGINE_PARTS, at, engine_settings, fields_of, make
from quire.config.start import RequestDefaults

if TYPE_CHECKING:
    from typing import Unpack

    from quire.config.typed_arguments import EngineArguments

_Class = TypeVar("_Class", bound=type)
_WIDTH = 110


def engine_config(*, model: str | None = None, **arguments: Unpack[EngineArguments]) -> EngineConfig:
    """The settings that arguments of `LLM` ask for, by the names that it has for them; None leaves a default.

    Raises QuireError for a value out of bounds, and TypeError for an unknown name.
    """
    given: dict[str, Any] = {"model": model, **arguments}
    unknown = sorted(set(given) - {row.name for row in engine_settings()})
    if unknown:
        raise TypeError(f"unknown argument: {', '.join(unknown)}")
    parts = {field: make(config, given) for field, config in ENGINE_PARTS.items()}
    return EngineConfig(**parts, **fields_of(EngineConfig, given))


@dataclass(frozen=True)
class LLMSettings:
    """What the arguments of `LLM()` ask for. note: a line for the log about vLLM's arguments that were taken."""

    engine: EngineConfig
    requests: RequestDefaults
    note: str | None


def llm_settings(**given: Any) -> LLMSettings:
    """The arguments of `LLM()`, quire's and vLLM's.

    Raises QuireError for a value out of bounds, or one of vLLM's that asks for something that is not done; TypeError,
    with the nearest name, for a name that neither has.
    """
    own = {row.name for row in at("LLM")}
    note = from_vllm.take("LLM", {name: value for name, value in given.items() if name not in own}, own)
    engine = {row.name for row in engine_settings()}
    config = engine_config(**{name: value for name, value in given.items() if name in engine})
    return LLMSettings(config, make(RequestDefaults, given), note)


def takes_settings(cls: _Class) -> _Class:
    """Let help() and editors see the settings that a class takes as `model` and `**settings`: in its signature, and in
    its docstring in the place of "{settings}".
    """
    table = sorted(at("LLM"), key=lambda row: row.name != "model")
    several = inspect.Parameter("vllm", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    cls.__init__.__signature__ = inspect.Signature(  # type: ignore[misc]
        [itself, *map(_parameter, table), several], return_annotation=None
    )
    lines = [line for row in table for line in _described(row)]
    if cls.__doc__:  # which python -OO leaves out
        cls.__doc__ = cls.__doc__.replace("{settings}", "\n".join(lines).strip())
    return cls


def _parameter(row: Setting) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if row.name == "model" else inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(row.name, kind, default=row.argument_default, annotation=row.argument_type | None)


def _described(row: Setting) -> list[str]:
    default = "" if row.shown_default is None else f"[{row.shown_default}]"
    text = " ".join(filter(None, (f"{row.name}: {row.help}", row.more, default)))
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12)
