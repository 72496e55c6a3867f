"""`EngineArgs` and `AsyncEngineArgs`: the arguments of an engine as one object, as programs for vLLM make it.

They hold what `LLM` takes, and what vLLM's have beside that; whatever asks for something that is not done is refused
when an engine is made of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, from_vllm
from quire.config.arguments import engine_config
from quire.config.setting import Kind
from quire.config.settings import at, engine_settings
from quire.config.vllm_names import Name

if TYPE_CHECKING:
    from typing import Unpack

    from quire.config.typed_arguments import LLMArguments

logger = logging.getLogger("quire")

_OWN = {row.name: row for row in sorted(at("EngineArgs"), key=lambda row: row.name != "model")}  # which comes first
_ENGINE = frozenset(row.name for row in engine_settings())
_SECRET = frozenset(row.name for row in _OWN.values() if row.secret)
_BESIDE: dict[str, Name] = {one.name: one for one in from_vllm.beside("LLM")}
_BESIDE_ASYNC: dict[str, Name] = {
    one.name: one for one in from_vllm.beside("serve") if one.name in ("enable_log_requests", "disable_log_requests")
}

if TYPE_CHECKING:

    @dataclasses.dataclass
    class _Arguments:
        """The names are the table's; see docs/settings.md."""

        def __init__(self, model: str | None = None, **settings: Unpack[LLMArguments]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    _Arguments = dataclasses.make_dataclass(
        "_Arguments", [(name, Any, None) for name in dict.fromkeys((*_OWN, *_BESIDE))], repr=False
    )


class EngineArgs(_Arguments):
    """The arguments of an engine, by the names that `LLM` has for them, and vLLM's. None: not given.

    Raises TypeError for a name that neither has.
    """

    def given(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def create_engine_config(self) -> EngineConfig:
        """The settings that they ask for. Raises QuireError for what is not done."""
        given = self.given()
        asynchronous = {name: given.pop(name) for name in _BESIDE_ASYNC if name in given}
        lines = [
            from_vllm.take("LLM", {name: value for name, value in given.items() if name in _BESIDE}),
            from_vllm.take("serve", asynchronous),
        ]
        for line in filter(None, lines):
            logger.warning("%s: %s", type(self).__name__, line)
        return engine_config(**{name: value for name, value in given.items() if name in _ENGINE})

    def __repr__(self) -> str:
        given = {name: "..." if name in _SECRET else value for name, value in self.given().items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser a flag for each of them."""
        group = parser.add_argument_group(cls.__name__, "What an engine is made with.")
        for field in dataclasses.fields(cls):
            flag = "--" + field.name.strip("_").replace("_", "-")
            own, beside = _OWN.get(field.name), _BESIDE.get(field.name) or _BESIDE_ASYNC.get(field.name)
            if (own is not None and own.kind is Kind.SWITCH) or (beside is not None and beside.switch):
                group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None)
            else:
                is_text = own is not None and own.kind is Kind.TEXT
                group.add_argument(flag, dest=field.name, type=str if is_text else _value, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Of what a parser has read."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


_MoreArguments: Any = dataclasses.make_dataclass(
    "_MoreArguments", [(name, Any, None) for name in _BESIDE_ASYNC], bases=(EngineArgs,), repr=False
)


class AsyncEngineArgs(_MoreArguments):  # type: ignore[misc]  # a class made of a table of names
    """EngineArgs, and what vLLM's `AsyncEngineArgs` has beside them."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that takes underscores for hyphens in the names of flags."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's."""
        words = []
        for word in sys.argv[1:] if args is None else args:
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
        return super().parse_args(words, namespace)


def _value(text: str) -> Any:
    """A number, a JSON value, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
