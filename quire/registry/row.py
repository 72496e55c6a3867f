"""A row of the registry."""

from __future__ import annotations

from dataclasses import dataclass

TEXT = frozenset({"text"})
IMAGES = TEXT | {"image"}
SOUNDS = TEXT | {"audio"}


@dataclass(frozen=True)
class Row:
    """architecture: its name in config.json. target: "module:Class". capabilities: of "text", "image", "audio".

    package: the distribution that brought the row; None for quire's own. config: "module:Class" of what reads such a
    config.json where transformers has no class for it; None: transformers' does. text_alone: such a model sees, and is
    served without: images are refused, and it says so when it is loaded.
    """

    architecture: str
    target: str
    capabilities: frozenset[str] = TEXT
    package: str | None = None
    config: str | None = None
    text_alone: bool = False
