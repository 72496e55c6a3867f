"""The command line of `quire serve` as people who come from vLLM write it -> as click takes it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.from_vllm import beside
from quire.config.vllm_names import SHORT

BESIDE = {one.name: one for one in beside("serve")}
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in BESIDE}
_OF_VLLM = {
    **{flag: name for name, flag in _FLAGS.items()},
    **{f"--no-{flag[2:]}": name for name, flag in _FLAGS.items() if BESIDE[name].switch},
    **{short: name for name, short in SHORT.items() if name in BESIDE},
}  # by flag

_BOOLEANS = {"true": True, "false": False}
_MODULES = "--lora-modules"
_TOKEN = "--hf-token"  # which may be without a value


@dataclass
class _Values:
    """An option that may be repeated, and the values that follow it."""

    name: str
    values: list[str]


class Words:
    """Reads the words of a command line by the command's parameters.

    It takes underscores for hyphens in the names of options; several values after an option that may be repeated;
    true or false after a switch; and --option.key value for a key of an option that is a JSON object. Options that only
    vLLM has are taken out, into `of_vllm`.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        options = [param for param in params if getattr(param, "param_type_name", "") == "option"]
        self._by_flag = {flag: one for one in options for flag in (*one.opts, *one.secondary_opts)}
        self._read: list[str | _Values] = []
        self._left: list[str] = []
        self._objects: dict[str, dict[str, Any]] = {}
        self._has_model = False
        self.of_vllm: dict[str, Any] = {}  # options that vLLM has and quire has not

    def as_click_takes_them(self, args: Sequence[str]) -> list[str]:
        """Raises ValueError, with what is wrong, where a word could be meant in two ways."""
        self._left = list(args)
        self._has_model = any(word == "--model" or word.startswith("--model=") for word in args)
        while self._left:
            word = self._left.pop(0)
            if word == "--":
                self._has_model |= bool(self._left)
                self._read += [word, *self._left]
                break
            if word.startswith("-") and word != "-":
                self._option(word)
            else:
                self._has_model = True
                self._read.append(word)
        if not self._has_model:
            self._part_model()
        for name in self._objects:
            if any(isinstance(read, str) and read.split("=")[0] == name for read in self._read):
                raise ValueError(f"{name} is given whole, and {name}.KEY too: give one of them.")
        words = [word for name, held in self._objects.items() for word in (name, json.dumps(held))]
        for read in self._read:
            words += [read] if isinstance(read, str) else [word for value in read.values for word in (read.name, value)]
        return words

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        option = self._by_flag.get(name)
        if option is None and (name in _OF_VLLM or name.split(".")[0] in _OF_VLLM):
            self._beside(name, equals, value)
        elif option is None and "." in name and name.split(".")[0] in self._by_flag:
            self._key(name, value if equals else self._next(name))
        elif option is None:
            self._read.append(name + equals + value)
        elif getattr(option, "is_flag", False):
            self._switch(name, option, equals, value)
        elif getattr(option, "multiple", False):
            self._several(name, [value] if equals else [])
        elif name == _TOKEN and not equals and (not self._left or self._left[0].startswith("-")):
            self._read += [name, "true"]
        else:
            self._read += [name + equals + value] if equals else [name, self._next(name)]

    def _beside(self, name: str, equals: str, value: str) -> None:
        """An option of vLLM's: what it asks for is looked at later."""
        flag, _, key = name.partition(".")
        one = BESIDE[_OF_VLLM[flag]]
        if not one.switch:
            value = value if equals else self._next(name)
            self.of_vllm[one.name] = {key: value} if key else value
            return
        if not equals and self._left and self._left[0].lower() in _BOOLEANS:
            value = self._left.pop(0)
        on = _BOOLEANS.get(value.lower(), True)
        self.of_vllm[one.name] = on is not flag.startswith("--no-")

    def _next(self, name: str) -> str:
        if not self._left:
            raise ValueError(f"{name} needs a value.")
        return self._left.pop(0)

    def _key(self, name: str, value: str) -> None:
        """One key of an object: what click gets is the whole object, once."""
        flag, *keys = name.split(".")
        held = self._objects.setdefault(flag, {})
        for key in keys[:-1]:
            held = held.setdefault(key.replace("-", "_"), {})
        try:
            held[keys[-1].replace("-", "_")] = json.loads(value)
        except ValueError:
            held[keys[-1].replace("-", "_")] = value

    def _switch(self, name: str, option: Any, equals: str, value: str) -> None:
        if not equals and self._left and self._left[0].lower() in _BOOLEANS:
            equals, value = "=", self._left.pop(0)
        if not equals:
            self._read.append(name)
            return
        if value.lower() not in _BOOLEANS:
            raise ValueError(f"{name}: is a switch; {value!r} is neither true nor false.")
        on = _BOOLEANS[value.lower()] is (name in option.opts)
        if on or option.secondary_opts:
            self._read.append((option.opts if on else option.secondary_opts)[0])

    def _several(self, name: str, values: list[str]) -> None:
        """All values up to the next option."""
        if not values:  # the first is one whatever it looks like
            values.append(self._next(name))
        while self._left and not self._left[0].startswith("-"):
            if name == _MODULES and not _is_module(self._left[0]):
                break
            values.append(self._left.pop(0))
        self._read.append(_Values(name, values))

    def _part_model(self) -> None:
        """The model may stand behind one value, as behind that of any other option; behind several it is one of them
        in vLLM's reading, and nobody could tell.
        """
        lists = [read for read in self._read if isinstance(read, _Values) and read.name != _MODULES]
        longer = [read for read in lists if len(read.values) > 1]
        if not longer:
            return
        named = {"QUIRE_MODEL", "QUIRE_CONFIG"} & set(os.environ) or "--config" in self._read
        if len(longer) > 1 or len(longer[0].values) > 2 or named:
            name, values = longer[0].name, longer[0].values
            raise ValueError(
                f"{name} {' '.join(values)}: it cannot be told whether {values[-1]!r} is a value or the model; "
                f"put the model first: quire serve MODEL {name} ..., or, without one, repeat the option for each value"
            )
        self._read.append(longer[0].values.pop())


def _is_module(word: str) -> bool:
    return "=" in word or word.startswith("{")
