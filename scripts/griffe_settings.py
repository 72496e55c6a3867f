"""An extension of griffe, which reads docstrings for the site: what is completed at run time is taken from there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import griffe

PLACE = "{settings}"  # where quire.config.arguments puts the table of settings


class Settings(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None and PLACE in cls.docstring.value:
            text = getattr(import_module(cls.module.path), cls.name).__doc__
            assert text and PLACE not in text
            cls.docstring.value = griffe.Docstring(text).value
