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
from typing import Any

from quire.config import EngineConfig, from_vllm
from quire.config.arguments import ENGINE_ARGUMENTS, engine_config, type_of
from quire.config.vllm_names import Name

logger = logging.getLogger("quire")

# Arguments of `LLM` that say what holds where a request says nothing.
_OF_LLM = ("generation_config", "override_generation_config")
_BESIDE: dict[str, Name] = {one.name: one for one in from_vllm.beside("LLM")}
_BESIDE_ASYNC: dict[str, Name] = {
    one.name: one for one in from_vllm.beside("serve") if one.name in ("enable_log_requests", "disable_log_requests")
}
_NAMES = dict.fromkeys(("model", *ENGINE_ARGUMENTS, *_OF_LLM, *_BESIDE))
_Arguments: Any = dataclasses.make_dataclass("_Arguments", [(name, Any, None) for name in _NAMES], repr=False)


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
        return engine_config(**{name: value for name, value in given.items() if name in ("model", *ENGINE_ARGUMENTS)})

    def __repr__(self) -> str:
        given = {name: "..." if name == "hf_token" else value for name, value in self.given().items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser a flag for each of them."""
        group = parser.add_argument_group(cls.__name__, "What an engine is made with.")
        for field in dataclasses.fields(cls):
            flag = "--" + field.name.strip("_").replace("_", "-")
            hint = type_of(field.name)
            beside = _BESIDE.get(field.name) or _BESIDE_ASYNC.get(field.name)
            if hint is bool or (beside is not None and beside.switch):
                group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None)
            else:
                group.add_argument(flag, dest=field.name, type=str if hint is str else _value, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Of what a parser has read."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


_MoreArguments: Any = dataclasses.make_dataclass(
    "_MoreArguments", [(name, Any, None) for name in _BESIDE_ASYNC], bases=(EngineArgs,), repr=False
)


class AsyncEngineArgs(_MoreArguments):
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
