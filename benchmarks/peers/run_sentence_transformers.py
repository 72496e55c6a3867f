"""sentence-transformers on torch: run_sentence_transformers.py MODEL DTYPE

Its own `encode`, which sorts texts by length and pads batches of 32.
"""

from __future__ import annotations

import sys

from worker import Requests, Run, serve


def start() -> Run:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(sys.argv[1], device="cpu", model_kwargs={"dtype": getattr(torch, sys.argv[2])})

    def run(case: str, requests: Requests) -> None:
        vectors = model.encode([text for text, _ in requests], batch_size=32, show_progress_bar=False)
        assert len(vectors) == len(requests)

    run("", [["w1 w2 w3", 5]])
    return run


if __name__ == "__main__":
    serve(start)
