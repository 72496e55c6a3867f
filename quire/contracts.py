"""The old name of `quire.types`, for plug-ins that were written for it."""

import warnings

from quire import types
from quire.types import *  # noqa: F403
from quire.types import PlaceholderRange as MediaItem  # noqa: F401

__all__ = [name for name in dir(types) if not name.startswith("_")]

warnings.warn("quire.contracts is now quire.types: import from there", DeprecationWarning, stacklevel=2)
