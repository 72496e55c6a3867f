"""quire: run_quire_embeddings.py MODEL DTYPE"""

from __future__ import annotations

import sys

from worker import Requests, Run, serve


def start() -> Run:
    from quire import LLM

    # Steps whose activations stay in the third-level cache.
    llm = LLM(sys.argv[1], dtype=sys.argv[2], max_num_batched_tokens=1024, max_num_seqs=256)

    def run(case: str, requests: Requests) -> None:
        vectors = llm.embed([text for text, _ in requests], use_tqdm=False)
        assert len(vectors) == len(requests)

    run("", [["w1 w2 w3", 5]])
    return run


if __name__ == "__main__":
    serve(start)
