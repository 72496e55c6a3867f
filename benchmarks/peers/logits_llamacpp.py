"""llama.cpp's logits of every prompt token: logits_llamacpp.py MODEL.gguf PROMPTS.json OUT.npy

PROMPTS: lists of token ids, each of at most a batch. OUT: [tokens of all prompts, vocabulary] in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from run_llamacpp import Engine


def main() -> None:
    engine = Engine(sys.argv[1])
    found = []
    for token_ids in json.loads(Path(sys.argv[2]).read_text()):
        engine.batch.n_tokens = 0
        for position, token in enumerate(token_ids):
            engine.put(token, position, 0, logits=True)
        found.append(engine.decode(len(token_ids)).copy())
        engine.lib.llama_memory_seq_rm(engine.memory, 0, -1, -1)
    np.save(sys.argv[3], np.concatenate(found))


if __name__ == "__main__":
    main()
