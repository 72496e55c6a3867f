"""What tests of checkpoints share: the architectures, edits of files, and what loading them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoint.files import SINGLE
from quire.models.loader import load_model
from tests.models import run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE


def edit_config(path: Path, **fields) -> Path:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def edit_weights(path: Path, change) -> Path:
    tensors = load_file(path / SINGLE)
    save_file(change(tensors) or tensors, path / SINGLE, metadata={"format": "pt"})
    return path


def logits_of(path: Path, dtype="auto") -> torch.Tensor:
    return run_model.logits(load_model(path, dtype), tiny.token_ids(12))


def fails(path: Path, error: type[Exception], *parts: str, dtype="auto") -> str:
    with pytest.raises(error) as caught:
        load_model(path, dtype)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)
