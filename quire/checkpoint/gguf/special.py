"""The tokens that a GGUF file names: which begins a text, which end one; and the tokenizer's truth values."""

from __future__ import annotations

from quire.checkpoint.gguf.file import GgufFile
from quire.errors import CheckpointError

KEY = "tokenizer.ggml."
_NONE = (-1, (1 << 32) - 1)  # -1 as writers put it, and as a number without a sign


def token_id(file: GgufFile, key: str) -> int | None:
    """Of "bos", "eos", "eot", ...; None: the file names none. Raises CheckpointError for one that there is not."""
    name = f"{KEY}{key}_token_id"
    found = file.metadata.get(name)
    if found is None or (type(found) is int and found in _NONE):
        return None
    tokens, table = file.metadata.get(f"{KEY}tokens"), file.tensors.get("token_embd.weight")
    count = len(tokens) if isinstance(tokens, list) else table.shape[0] if table is not None else 0
    if type(found) is not int or not 0 <= found < count:
        raise CheckpointError(f"{file.name}: {name} is {repr(found)[:60]}, and the tokens are 0 to {count - 1:,}.")
    return found


def is_set(file: GgufFile, key: str, default: bool) -> bool:
    """Raises CheckpointError for what is no truth value."""
    found = file.metadata.get(KEY + key, default)
    if type(found) is not bool:
        raise CheckpointError(f"{file.name}: {KEY}{key} is {repr(found)[:60]}: it must be true or false.")
    return found
