"""Which kind of files a folder's weights are in."""

from __future__ import annotations

from pathlib import Path

from quire.checkpoint.files import INDEX, PICKLED, PICKLED_INDEX, SINGLE, Checkpoint
from quire.checkpoint.gguf.folder import only_model
from quire.checkpoint.joined import joined


def open_checkpoint(directory: Path, load_format: str = "auto") -> Checkpoint:
    """The tensors of a directory's files. load_format: as `Checkpoint` takes it; a GGUF file, which stands there alone,
    is read whatever it is. Raises CheckpointError."""
    if not any((directory / name).exists() for name in (SINGLE, INDEX, PICKLED, PICKLED_INDEX)):
        model = only_model(directory)
        if model is not None:
            from quire.checkpoint.gguf.file import open_tensors
            from quire.checkpoint.gguf.tensors import GgufCheckpoint

            return GgufCheckpoint(directory, open_tensors(model))
    return joined(Checkpoint(directory, load_format))
