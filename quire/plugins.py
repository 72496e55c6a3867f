"""What packages bring beside quire's own: named by whoever starts the engine, and imported then.

A name is `module:NAME`, or that of an entry point in a group that an installed package has. Nothing is imported that
was not named: what is merely installed does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from quire.errors import QuireError

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class PluginGroup:
    """A group of entry points.

    group: what packages call it.  field: the setting that has the name.  form: of a name that says where to import it
    from.  what: they are, in the plural.
    """

    group: str
    field: str
    form: str
    what: str

    def load(self, name: str, own: Iterable[str] = ()) -> Any:
        """What a name stands for. own: the names of quire's own, none of which it is.

        Raises QuireError for what cannot be found or imported, naming what there is.
        """
        target = name if ":" in name else self._target(name, sorted(own))
        module, separator, path = target.replace(" ", "").partition(":")
        if not (module and separator and path):
            raise QuireError(f"{self.field}: {name!r} is not of the form {self.form!r}.")
        try:
            value: Any = import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except Exception as error:  # whatever a module does when imported
            raise QuireError(f"{self.field}: {name!r} cannot be imported: {root_cause(error)}") from error
        return value

    def _target(self, name: str, own: list[str]) -> str:
        found = {point.value for point in self._points() if point.name == name}
        if not found:
            neither = f"is none of {', '.join(own)}, nor {self.form!r}, nor" if own else f"is neither {self.form!r} nor"
            raise QuireError(f"{self.field}: {name!r} {neither} the name of an installed one{self.told_installed()}.")
        if len(found) > 1:
            raise QuireError(f"{self.field}: {name!r} is the name of several: {', '.join(sorted(found))}.")
        return found.pop()

    def told_installed(self) -> str:
        """The names of what is installed, as the end of a sentence."""
        names = sorted({point.name for point in self._points()})
        return f"; installed: {', '.join(names)}" if names else ""

    def _points(self) -> Sequence[metadata.EntryPoint]:
        try:
            return tuple(metadata.entry_points(group=self.group))
        except Exception as error:  # metadata of any age and origin
            logger.warning("A package's metadata cannot be read, so no %s are seen: %s", self.what, root_cause(error))
            return ()


def root_cause(error: BaseException) -> str:
    """The innermost exception of a chain, as "Type: message"."""
    while (inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
