"""A torchvision that cannot be imported must not take transformers' image models with it: they do without."""

from __future__ import annotations

import importlib.util
import logging
import sys
from functools import cache

logger = logging.getLogger("quire")


@cache
def hide_if_broken() -> None:
    """Make an installed torchvision that fails to import (built for another torch, as a rule) count as not installed.

    Transformers asks only whether the package is there, and then imports it.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        logger.warning("torchvision is installed, but cannot be imported (%s); images are processed without it", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # what importlib takes for "not there"
