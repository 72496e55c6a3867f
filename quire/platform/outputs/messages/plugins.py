"""The formats of a name: quire's own, or what packages bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.errors import QuireError
from quire.platform.outputs.messages.reasoning_formats import ReasoningFormat
from quire.platform.outputs.messages.tool_format import ToolFormat
from quire.platform.outputs.messages.tool_formats import FORMATS
from quire.plugins import PluginGroup

Format = TypeVar("Format", bound=ToolFormat | ReasoningFormat)

TOOL_PARSERS = PluginGroup("quire.tool_parsers", "tool_call_parser", "module:FORMAT", "tool parsers")
REASONING_PARSERS = PluginGroup("quire.reasoning_parsers", "reasoning_parser", "module:FORMAT", "reasoning parsers")


def tool_format(name: str, fits: Callable[[ToolFormat], bool] = lambda format: False) -> ToolFormat:
    """The format of calls that has a name: quire's own, an installed one's, or `module:FORMAT`.

    fits: whether one fits the model's chat template. A family that has changed its notation has several of one name.

    Raises QuireError for what cannot be found or imported, or is no ToolFormat.
    """
    return _found(name, FORMATS, TOOL_PARSERS, ToolFormat, fits)


def reasoning_format(
    name: str, own: Sequence[ReasoningFormat], fits: Callable[[ReasoningFormat], bool] = lambda format: False
) -> ReasoningFormat:
    """The same of reasoning. own: quire's."""
    return _found(name, own, REASONING_PARSERS, ReasoningFormat, fits)


def _found(name: str, own: Sequence[Format], group: PluginGroup, kind: Any, fits: Callable[[Format], bool]) -> Format:
    named = [one for one in own if name in (one.name, *one.aliases)]
    if named:
        return next(filter(fits, named), named[0])
    found = group.load(name, {known for one in own for known in (one.name, *one.aliases)})
    if not isinstance(found, kind):
        raise QuireError(
            f"{group.field}: {name!r} is not an object of a class derived from quire.{kind.__name__}, but {found!r}; "
            "see docs/tool-calling.md."
        )
    made: Format = found
    return made
