"""Which back end answers a call: decided by the device of the tensors.

A back end is a module with a function for each row of `table.TABLE`. On the CPU that is `native` (the compiled kernels
of `csrc/cpu`, with the best instruction set that the machine has), or `reference` (plain torch) where the extension was
not built; a warning says so once. On a GPU it is `cuda` (`csrc/cuda`). For tensors without numbers it is `rehearsal`
while a model is gone through. QUIRE_KERNELS=reference forces the reference kernels,
QUIRE_ISA=amx|avx512|avx512vnni|avx512f|avxvnni|avx2|portable an instruction set.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from quire.errors import QuireError

if TYPE_CHECKING:
    import torch

_CSRC = Path(__file__).parents[2] / "csrc"  # there where these are the sources, and not what was installed
_HERE = (
    "This is quire's source folder: start Python in another one to use the quire that is installed, or compile the "
    "kernels here (make setup)."
)
_ELSEWHERE = "Install a C++17 compiler and reinstall quire."


@cache
def backend() -> ModuleType:
    """The module whose functions work on the CPU's tensors: `native` or `reference`."""
    from quire.kernels import reference

    wanted = os.environ.get("QUIRE_KERNELS", "")
    if wanted == "reference":
        return reference
    if wanted not in ("", "native"):
        raise QuireError(f"QUIRE_KERNELS={wanted}: must be native or reference")
    try:
        from quire.kernels import native
    except ImportError as error:
        warnings.warn(
            f"quire's native kernels are not available ({error}); running on the slow torch reference "
            f"kernels. {_HERE if _CSRC.is_dir() else _ELSEWHERE}",
            RuntimeWarning,
            stacklevel=3,
        )
        return reference
    return native


@cache
def cuda_backend() -> ModuleType:
    """The module whose functions work on tensors that lie on a GPU. Raises QuireError where it was not built."""
    try:
        from quire.kernels import cuda
    except ImportError as error:
        raise QuireError(
            f"quire's CUDA kernels are not available ({error}): install CUDA's compiler (nvcc) and reinstall quire, "
            "or run on the CPU (device='cpu')."
        ) from error
    return cuda


def backend_of(x: torch.Tensor) -> ModuleType:
    """The module whose functions work on x."""
    if x.is_cpu:
        return backend()
    return _without_numbers() if x.is_meta else cuda_backend()


def _without_numbers() -> ModuleType:
    from quire.kernels import rehearsal

    return rehearsal if rehearsal.is_on() else backend()
