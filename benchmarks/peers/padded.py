"""Batches as sentence-transformers makes them: texts sorted by length, 32 at a time, padded to the longest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from worker import Requests, Run

BATCH = 32
Forward = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids and mask [B, L] int64 -> hidden states [B, L, C]


def padded_run(model: str, forward: Forward) -> Run:
    """What embeds texts by the mean of their tokens' hidden states, normalized."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))

    def run(case: str, requests: Requests) -> None:
        encoded = sorted((one.ids for one in tokenizer.encode_batch([text for text, _ in requests])), key=len)
        for first in range(0, len(encoded), BATCH):
            some = encoded[first : first + BATCH]
            ids = np.zeros((len(some), max(map(len, some))), np.int64)
            mask = np.zeros_like(ids)
            for row, one in enumerate(some):
                ids[row, : len(one)], mask[row, : len(one)] = one, 1
            hidden = forward(ids, mask)
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors = means / np.linalg.norm(means, axis=1, keepdims=True)
            assert np.isfinite(vectors).all()

    run("", [["w1 w2 w3", 5]])
    return run
