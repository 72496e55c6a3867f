"""Transformers' own modules beside the rows of the registry: fallback.py [FAMILY ...] [--rounds N] [--most N]

The same checkpoint twice in one process, by model_impl="quire" and by model_impl="transformers", in turns on the same
requests. Models are those of `families.py`, and its Llama: some 250 M random parameters in bf16. What is printed are
output tokens per second (medians of the rounds) and the ratio within a round.

single      one request of 248 prompt and 128 output tokens
batch       32 requests of mixed lengths (`quire bench`'s)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from families import FAMILIES, SIZES, cases, make
from lora import compare

from quire import LLM

MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": FAMILIES["qwen3"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--models", type=Path, help="a folder for the models, which stay there; default: a temporary one"
    )
    parser.add_argument("--most", type=int, default=10**6, help="tokens of a prompt, and of an answer; default: all")
    args = parser.parse_args()
    wrong = sorted(set(args.family) - set(MODELS))
    if wrong:
        parser.error(f"unknown family {', '.join(wrong)}: choose from {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory(prefix="quire-fallback-") as temporary:
        for family in args.family or MODELS:
            architecture, config_class, own = MODELS[family]
            folder = (args.models or Path(temporary)) / f"fallback-{family}"
            path = make(folder, architecture, config_class, {**SIZES, **own})
            sides: dict[str, tuple[LLM, list[Any]]] = {}
            for impl in ("quire", "transformers"):
                llm = LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, model_impl=impl)
                sides[f"{family} by {impl}"] = llm, [None]
            for case, requests in cases(SIZES["vocab_size"]):
                cut = [(ids[: args.most], min(wanted, args.most)) for ids, wanted in requests]
                compare(case, sides, cut, args.rounds)


if __name__ == "__main__":
    main()
