"""The old name of `quire.layers`, for plug-ins that were written for it; so are the modules in it."""

import sys
import warnings
from importlib import import_module

from quire.layers import *  # noqa: F403
from quire.layers import __all__ as __all__

for _name in ("activation", "adapters", "attention", "embedding", "linear", "norm", "rotary", "rows"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"quire.layers.{_name}")

warnings.warn("quire.models.layers is now quire.layers: import from there", DeprecationWarning, stacklevel=2)
