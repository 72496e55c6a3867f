"""What a KV cache of int8 costs: perplexity of texts, and greedy tokens, beside a cache in the model's dtype.

python benchmarks/kv_quality.py [--model smollm2] [--dtype auto] [--tokens 1024] [--texts 8]

The texts are docstrings and sources of Python's standard library, which every machine has. Perplexity is e to the mean
of -log p over all tokens but each text's first, by the engine's own prompt log-probabilities; greedy tokens continue
each text's first 64.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sysconfig
from pathlib import Path

from quire import LLM, SamplingParams

DTYPES = ("auto", "int8")
STEPS, BEGINNING = 48, 64


def texts(count: int) -> list[str]:
    """The language reference's longest topics, then the library's licence and modules with much prose."""
    topics = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    library = Path(sysconfig.get_path("stdlib"))
    names = ("LICENSE.txt", "argparse.py", "decimal.py", "typing.py", "statistics.py", "pdb.py")
    files = [library / name for name in names if (library / name).is_file()]
    return [*topics[: count - len(files)], *(path.read_text() for path in files)][:count]


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Of every token of the prompts but their first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    found = []
    for ids, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        found += [place[token].logprob for place, token in zip(output.prompt_logprobs, ids, strict=True) if place]
    return found


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    beginnings = [{"prompt_token_ids": ids[:BEGINNING]} for ids in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(beginnings, params, use_tqdm=False)]


def agreed(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--texts", type=int, default=8)
    arguments = parser.parse_args()
    scores, answers = {}, {}
    for dtype in DTYPES:
        llm = LLM(
            arguments.model,
            dtype=arguments.dtype,
            kv_cache_dtype=dtype,
            max_model_len=arguments.tokens + STEPS,
            max_num_seqs=8,
        )
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer(text)["input_ids"][: arguments.tokens] for text in texts(arguments.texts)]
        scores[dtype], answers[dtype] = logprobs(llm, prompts), greedy(llm, prompts)
        pool = llm.llm_engine.executor.facts
        size = pool.pool_bytes / pool.num_blocks / llm.llm_engine.config.cache.block_size
        perplexity = math.exp(-sum(scores[dtype]) / len(scores[dtype]))
        print(f"{dtype:>5}: perplexity {perplexity:.4f} over {len(scores[dtype])} tokens, {size:.0f} bytes a token")
    change = sum(a - b for a, b in zip(scores["auto"], scores["int8"], strict=True)) / len(scores["auto"])
    mean = sum(abs(a - b) for a, b in zip(scores["auto"], scores["int8"], strict=True)) / len(scores["auto"])
    print(f"perplexity {100 * math.expm1(change):+.3f} %; mean difference of a log-probability {mean:.4f}")
    pairs = list(zip(answers["auto"], answers["int8"], strict=True))
    same = sum(one == other for one, other in pairs)
    print(
        f"greedy: {same} of {len(pairs)} answers of {STEPS} tokens equal, "
        f"{sum(agreed(*pair) for pair in pairs) / len(pairs):.1f} tokens on average before the first that differs"
    )


if __name__ == "__main__":
    main()
