"""The fields of a checkpoint's quantization settings: each is honoured, changes nothing, or is refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from quire.errors import UnsupportedModelError

# What a field has that does nothing, if nothing else is known of it.
NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
_MOST = 1 << 31  # columns or rows


class Settings:
    """One object of settings, and where it stands, for messages. Whatever nobody takes is refused at the end.

    where: "quantization_config", say.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._raw = dict(raw)

    def __iter__(self) -> Iterator[str]:
        """The names of the fields that nobody has taken."""
        return iter(list(self._raw))

    def take(self, name: str, default: Any = None) -> Any:
        """A field's value; null is as good as absent."""
        value = self._raw.pop(name, None)
        return default if value is None else value

    def one_of(self, name: str, values: Collection[Any], default: Any = None) -> Any:
        """A field's value, which must be one of these, True no more 1 than "1" is. Raises UnsupportedModelError."""
        value = self.take(name, default)
        if not any(type(value) is type(one) and value == one for one in values):
            self.refuse(name, value, f"served are {', '.join(repr(one) for one in values)}")
        return value

    def size(self, name: str, default: int | None = None, others: Collection[int] = ()) -> int:
        """A number of columns or rows, or one of `others`. Raises UnsupportedModelError."""
        value = self.take(name, default)
        if type(value) is not int or (not 1 <= value <= _MOST and value not in others):
            ways = "".join(f", or {one}" for one in others)
            self.refuse(name, value, f"it must be a whole number from 1 to {_MOST:,}{ways}")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "it must be true or false")
        return value

    def inner(self, name: str) -> Settings | None:
        """An object within this one. Raises UnsupportedModelError."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, value, "it must be an object")
        return Settings(value, f"{self.where}.{name}")

    def names(self, name: str) -> list[str]:
        """A list of names. Raises UnsupportedModelError."""
        value = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(name, value, "it must be a list of names")
        return value

    def drop(self, names: Iterable[str]) -> None:
        """Fields that tell how the numbers were found, or which program reads them: they change no answer."""
        for name in names:
            self._raw.pop(name, None)

    def finish(self) -> None:
        """Refuse what nobody has taken, unless it does nothing. Raises UnsupportedModelError."""
        for name, value in self._raw.items():
            if value not in NEUTRAL:
                self.refuse(name, value, "quire does not know what it changes")

    def refuse(self, name: str, value: Any, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.where}: {name}={value!r}: {reason}.")


__all__ = ["Settings"]
