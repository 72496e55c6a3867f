"""Tiny random checkpoints that make vectors and classes, and what transformers makes of prompts with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from quire import LLM

Ids = list[int]


def prompts(vocabulary: int, lengths: Sequence[int], seed: int = 3) -> list[Ids]:
    """Random token ids, none of them among the first five, which families have for padding and the like."""
    draw = random.Random(seed)
    return [[draw.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


def given(batch: Sequence[Ids]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in batch]


def saved(model: PreTrainedModel, path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Save a model in a dtype; return it in float64, with the weights that the file has."""
    model = model.to(dtype).eval()
    model.save_pretrained(path)
    return model.double()


def change(path: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def engine(path: Path, **settings: Any) -> LLM:
    """Tables are checked after each step; no tokenizer."""
    return LLM(str(path), **{"debug": True, "num_gpu_blocks_override": 96, "skip_tokenizer_init": True, **settings})


def hidden(model: PreTrainedModel, ids: Ids, **more: torch.Tensor) -> torch.Tensor:
    """The last hidden states [T, C] of one prompt, alone."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), **more).last_hidden_state[0]
    return found


def classes(model: PreTrainedModel, ids: Ids, **more: torch.Tensor) -> torch.Tensor:
    """The bare numbers of classes, of one prompt alone: [labels], or [T, labels] of tokens' classes."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), **more).logits[0]
    return found


def largest_error(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
    """Of numbers beside what they should be, as a share of the largest of these, or of 1."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        mine = torch.as_tensor(ours, dtype=torch.float64)
        assert mine.shape == theirs.shape
        worst = max(worst, float((mine - theirs).abs().max() / max(1.0, float(theirs.abs().max()))))
    return worst


Make = Callable[..., PreTrainedModel]
