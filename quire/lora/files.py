"""An adapter's files: adapter_config.json, and adapter_model.safetensors. Pickles are never opened.

Raises AdapterError throughout.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from quire.checkpoint.files import open_plain
from quire.checkpoint.safetensors_header import read_header
from quire.errors import AdapterError

WEIGHTS_FILE = "adapter_model.safetensors"
TOKENS = "token_adapter.trainable_tokens_delta"
Parts = dict[str, torch.Tensor]  # kind -> tensor: what PEFT calls them in the file

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|token_adapter\.trainable_tokens_delta)(?:\.weight)?"
)
_SAVED = re.compile(r"\.modules_to_save\.(?:[^.]+\.(?=.*\.))?")  # the adapter's name comes before a module's, only
_UNUSED = ".original_module."
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def read_text(path: Path, most: int) -> bytes:
    """The bytes of a file of at most `most`."""
    with opened(path, most) as (file, size):
        return file.read(size)


@contextmanager
def weights_file(path: Path, most: int) -> Iterator[tuple[BufferedReader, dict[str, torch.Tensor]]]:
    """The open file, of at most `most` bytes, and what its header says: tensors of shape and dtype alone, by name."""
    with opened(path, most) as (file, size):
        try:
            entries = read_header(file, size)
        except ValueError as error:
            raise AdapterError(f"{path}: is damaged or no safetensors file: {error}") from None
        if not entries:
            raise AdapterError(f"{path}: holds no tensors.")
        for name, entry in entries.items():
            if entry.dtype not in _DTYPES:
                raise AdapterError(f"{path.parent}: {name} is of dtype {entry.dtype}, no floating-point weight.")
        yield (
            file,
            {
                name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                for name, entry in entries.items()
            },
        )


@contextmanager
def opened(path: Path, most: int) -> Iterator[tuple[BufferedReader, int]]:
    """The open file and its size, of at most `most` bytes."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise AdapterError(f"{path}: has {size:,} bytes, and at most {most:,} are taken.")
            yield file, size
    except FileNotFoundError:
        pickle = path.with_name("adapter_model.bin")
        hint = f"; {pickle.name} is a pickle, which can run code and is never opened" if pickle.exists() else ""
        raise AdapterError(f"{path}: there is no such file{hint}.") from None
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror or error}.") from None


def read_tensors(file: BufferedReader, config_data: bytes, where: str) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The digest of both files, and the tensors of the open one."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    data = file.read(size)
    digest = hashlib.sha256(len(config_data).to_bytes(8, "little") + config_data)
    digest.update(data)
    try:
        return digest.digest(), load_safetensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise AdapterError(f"{where}/{WEIGHTS_FILE}: is damaged or no safetensors file: {error}") from None


def unused_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published parameter -> the base model's own, which PEFT writes beside a saved module's with bias="all", and of
    tables of embeddings with save_embedding_layers."""
    found = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items() if _UNUSED in key}
    return {name.replace(_UNUSED, "."): tensor for name, tensor in found.items()}


def sorted_tensors(tensors: Mapping[str, torch.Tensor], where: str) -> tuple[dict[str, Parts], dict[str, torch.Tensor]]:
    """(published module -> its LoRA tensors by kind, published parameter -> what replaces it)"""
    parts: dict[str, Parts] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        if _UNUSED in name:
            continue
        name = _SAVED.sub(".", name)
        match = _PART.fullmatch(name)
        if match:
            kinds = parts.setdefault(match[1], {})
            if match[2] in kinds:
                raise AdapterError(f"{where}: {key} is there twice.")
            kinds[match[2]] = tensor
        else:
            name = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", name)
            if name in plain and not _are_equal(plain[name], tensor):
                raise AdapterError(f"{where}: {key} is there twice.")
            plain[name] = tensor
    return parts, plain


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta:  # their numbers are not known yet
        return one.shape == other.shape
    return torch.equal(one.double(), other.double())
