"""What one row of the table of settings says, and how its value is checked.

A row stands where its field is declared, in the configuration that has it (`model.py`, `steps.py`, ...); the whole
table is `quire.config.settings`. From a row come the argument of `LLM()` and `EngineArgs`, the flag of `quire serve`,
the variable, the key of a YAML file, the line of help and of docs/settings.md, and vLLM's name for the same thing.
"""

# Annotations are evaluated here and in the files of rows: a field's type is read from them.

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Literal, TypeVar

from quire.errors import QuireError

Door = Literal["LLM", "EngineArgs", "serve"]
LLM_ONLY: tuple[Door, ...] = ("LLM", "EngineArgs")
SERVE_ONLY: tuple[Door, ...] = ("serve",)
ALL: tuple[Door, ...] = ("LLM", "EngineArgs", "serve")
NOWHERE: tuple[Door, ...] = ()

_ROW = "row"  # where a dataclass field keeps its row
_DAY = 86_400  # seconds
_T = TypeVar("_T")


class Group(StrEnum):
    """Settings that help and docs show together, in this order."""

    MODEL = "Model"
    ADDRESS = "Address, names and keys"
    CHAT = "Chat and sampling"
    LORA = "LoRA adapters"
    IMAGES = "Images"
    STEPS = "Steps and memory"
    LIMITS = "Limits and times"
    LOGS = "Logs"
    DEBUG = "To find faults"


class Kind(Enum):
    """How a setting is written as text: in a flag, a variable or a file."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"
    SIZE = "whole number, also as 4k, 2M or 1G"  # k is 1000, K is 1024
    SWITCH = "on or off"
    TEXTS = "several texts"
    OBJECT = "JSON object"
    LIMITS = "JSON object, or name=number"


@dataclass(frozen=True, eq=False, repr=False)
class Setting:
    """One row.

    help: one sentence or two, without the default; more: what docs add to it.
    group: where help and docs show it. doors: who takes it; none: it is found out by the program, not set.
    name: the argument's, if not the field's. The flag, the variable and the key of a file follow from it.
    kind: how it is written as text, if its type does not say it. metavar: what help shows for that.
    at_least, at_most, above: limits of a number, `above` excluded. choices: the only values.
    check: raises QuireError for what these cannot say; it is given any value, of whatever type.
    secret: its value is never shown.
    takes: the argument's type, if not the field's; convert: from the one to the other.
    shown: the default in words, where the field's default is not what help should say.
    vllm: whether vLLM has a setting of that name and meaning; a text: vLLM's name for it, which is a flag then too.
    flags, variables: further ones.

    What follows is read from the field: config and field, where it is; hint, its type, and its default.
    """

    help: str
    more: str = ""
    group: Group = Group.MODEL
    doors: tuple[Door, ...] = ALL
    name: str = ""
    kind: Kind = Kind.TEXT
    metavar: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], None] | None = None
    secret: bool = False
    takes: Any = None
    convert: Callable[[Any], Any] | None = None
    shown: str | None = None
    vllm: bool | str = False
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    config: type = object
    field: str = ""
    hint: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Its flag first."""
        theirs = ("--" + self.vllm.replace("_", "-"),) if isinstance(self.vllm, str) else ()
        return (self.flag, *self.flags, *theirs)

    @property
    def variable(self) -> str:
        return f"QUIRE_{self.name.upper()}"

    @property
    def vllm_name(self) -> str | None:
        """vLLM's name for it, if it has one."""
        return self.vllm if isinstance(self.vllm, str) else self.name if self.vllm else None

    @property
    def argument_type(self) -> Any:
        """What the argument may be, None (which leaves the default) aside."""
        if self.takes is not None:
            return self.takes
        kinds = [one for one in _alternatives(self.hint) if one is not types.NoneType]
        return functools.reduce(operator.or_, kinds)

    @property
    def argument_default(self) -> Any:
        """The field's default, where the argument has the field's form; else None, which leaves it."""
        plain = isinstance(self.default, (bool, int, float, str))
        return self.default if plain and self.takes is None else None

    @property
    def shown_default(self) -> str | None:
        """What help says that it is when it is not given; None: nothing to say."""
        value = self.default
        if self.shown is not None or self.kind is Kind.SWITCH:
            return self.shown
        if value is None or value == "" or not isinstance(value, (int, float, str)):
            return None
        if self.name.endswith("_bytes") and isinstance(value, int) and value % (1 << 20) == 0:
            return f"{value >> 20} MiB"
        return f"{value:g}{self._unit}" if isinstance(value, float) else str(value)

    def value(self, argument: Any) -> Any:
        """The field's value for an argument's. Raises RequestError for one that has another form."""
        if self.convert is not None:
            return self.convert(argument)
        return tuple(argument) if self.kind is Kind.TEXTS else argument

    def check_value(self, value: Any) -> None:
        """Raise QuireError for a value that the field cannot have."""
        if value is None and types.NoneType in _alternatives(self.hint):
            return
        if self.check is not None:  # first, as it says more of a value of a wrong type than that it is one
            self.check(value)
        wrong = self._complaint(value)
        if wrong:
            shown = self.field if self.secret else f"{self.field}={value!r}"
            raise QuireError(f"{shown}: {wrong}.")

    def _complaint(self, value: Any) -> str | None:
        """What is wrong with a value's type, size or choice."""
        kinds = tuple(typing.get_origin(one) or one for one in _alternatives(self.hint))
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if float in kinds:
            return None if number and self._within(value) else f"must be {self._range()}"
        if self.at_least is not None and not (number and isinstance(value, int) and value >= self.at_least):
            return f"must be an integer of at least {self.at_least}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most}"
        if self.choices and value not in self.choices:
            return (
                f"is {' or '.join(self.choices)}" if len(self.choices) == 2 else f"is one of {', '.join(self.choices)}"
            )
        if object not in kinds and not isinstance(value, kinds):
            return f"must be of type {' or '.join(one.__name__ for one in kinds if one is not types.NoneType)}"
        return None

    def _within(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and value == value  # which NaN is not
        )

    @property
    def _unit(self) -> str:
        return " s" if self.metavar == "SECONDS" else ""

    def _range(self) -> str:
        if self.above is not None:
            return f"above {self.above:g} and at most {self.at_most:g}{self._unit}"
        if self._unit:
            return f"seconds, from {self.at_least:g} to {self.at_most:g}"
        return "a number" if self.at_least is None else f"a number from {self.at_least:g} to {self.at_most:g}"


def setting(default: _T, help: str, **row: Any) -> _T:
    """Declare a field of a configuration that is a setting. row: further fields of `Setting`."""
    metadata = {_ROW: Setting(help, **row)}
    shown = not row.get("secret", False)
    how: dict[str, Any] = {"default": default}
    if isinstance(default, dict):
        how = {"default_factory": default.copy}
    return typing.cast(_T, dataclasses.field(repr=shown, metadata=metadata, **how))


def found(default: _T, help: str, **row: Any) -> _T:
    """Declare a field that no user sets: the program finds its value out. It is checked as the others are."""
    return setting(default, help, doors=NOWHERE, **row)


def seconds(default: float, help: str, **row: Any) -> float:
    """Declare a time, of a day at most."""
    least = None if "above" in row else 0
    return setting(default, help, **{"metavar": "SECONDS", "at_least": least, "at_most": _DAY, **row})


def rows(config: Any, doors: tuple[Door, ...] = ALL) -> tuple[Setting, ...]:
    """The rows of a configuration, in the order of its fields. doors: of all of them that do not have fewer."""
    return tuple(_complete(config, field, doors) for field in dataclasses.fields(config) if _ROW in field.metadata)


def _complete(config: Any, field: Any, doors: tuple[Door, ...]) -> Setting:
    row: Setting = field.metadata[_ROW]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return dataclasses.replace(
        row,
        config=config,
        name=row.name or field.name,
        field=field.name,
        hint=field.type,
        default=default,
        kind=_kind(field.type) if row.kind is Kind.TEXT else row.kind,
        doors=tuple(door for door in row.doors if door in doors),
    )


def _kind(kind: Any) -> Kind:
    """How values of a type are written."""
    names = {typing.get_origin(one) or one for one in _alternatives(kind)} - {types.NoneType}
    if str in names:
        return Kind.TEXT
    plain = {bool: Kind.SWITCH, int: Kind.WHOLE, float: Kind.NUMBER, tuple: Kind.TEXTS, Mapping: Kind.OBJECT}
    return plain[names.pop()]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """X | Y -> (X, Y)."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


class Checked:
    """A configuration whose fields are checked by their rows when it is made. Raises QuireError."""

    def __post_init__(self) -> None:
        for row in _rows_of(type(self)):
            row.check_value(getattr(self, row.field))


_KNOWN: dict[type, tuple[Setting, ...]] = {}


def _rows_of(config: type) -> tuple[Setting, ...]:
    if config not in _KNOWN:
        _KNOWN[config] = rows(config)
    return _KNOWN[config]
