"""What answers with a shape cost: structured.py [MODEL] [--case NAME ...] [--rounds N]

masks: over a vocabulary of 128,000 tokens, made of this Python's own sources: the time of a mask where the tokens of an
answer are not certain (median below 60 us), and from a schema that nobody has sent yet to its first mask (below 5 ms).
streams: 32 streams with 32 different schemas beside 32 free ones, in tokens a second (at least 0.95 of them).
forced: answers by a schema beside free ones of the same length, one stream: tokens that are certain are not drawn (at
least 1.2 times as fast).
MODEL: with a tokenizer; without one, a Llama of 254 M parameters with random weights.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from schemas import SCHEMAS, many, record

SIZE = 128_000
STREAMS, LENGTH = 32, 96


def large_tokenizer(size: int = SIZE) -> Any:
    """A byte-level BPE whose tokens are the commonest words of Python's own sources and all that these begin with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        words.update(word.replace(" ", "\u0120") for word in re.findall(r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\w\s]+", text))
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = set(vocabulary)
    merges: list[tuple[str, str]] = []
    for word, _ in words.most_common():
        for end in range(2, len(word) + 1):
            piece = word[:end]
            if piece not in vocabulary and letters.issuperset(piece) and len(vocabulary) < size - 1:
                vocabulary[piece] = len(vocabulary)
                merges.append((piece[:-1], piece[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def masks(args: argparse.Namespace) -> dict[str, Any]:
    """A mask, and a first one."""
    from quire import SamplingParams
    from quire.platform.sampling.structured.compiler import ConstraintCompiler
    from quire.platform.sampling.structured.params import StructuredOutputsParams

    tokenizer = large_tokenizer()
    size, end = len(tokenizer), tokenizer.eos_token_id
    compiler = ConstraintCompiler(tokenizer, size, frozenset([end]))
    first, each = [], []
    for number in range(1 + args.rounds):  # the first round makes the vocabulary, and is not counted
        for name, (schema, answer) in SCHEMAS.items():
            unseen = {**schema, "description": f"{name}, {number}"}
            params = SamplingParams(structured_outputs=StructuredOutputsParams(json=unseen))
            begin = time.perf_counter()
            (template,) = compiler.processors(params, frozenset([end]))
            processor = template.fork()
            processor.begin([processor])
            processor.settle()
            passed = time.perf_counter() - begin
            if number:
                first.append(passed)
            ids = tokenizer.encode(json.dumps(answer), add_special_tokens=False)
            place = 0
            while place < len(ids):
                begin = time.perf_counter()
                processor.fill()
                passed = time.perf_counter() - begin
                following = processor.follow([ids[place]], [])
                run = [ids[place], *(() if following is None else following.tokens)]
                if number:
                    each.append(passed)
                processor.advance(run[: len(ids) - place])
                place += len(run)
    return {
        "tokens": size,
        "mask_us": 1e6 * statistics.median(each),
        "mask_p99_us": 1e6 * sorted(each)[int(len(each) * 0.99)],
        "first_mask_ms": 1e3 * statistics.median(first),
        "first_mask_worst_ms": 1e3 * max(first),
        "good": statistics.median(each) < 60e-6 and statistics.median(first) < 5e-3,
    }


def _llm(args: argparse.Namespace, work: Path) -> Any:
    from cpu import make_llama

    from quire import LLM

    return LLM(str(args.model or make_llama(work)), max_num_seqs=STREAMS, enable_prefix_caching=False)


def _rate(llm: Any, shapes: list[Any]) -> float:
    """Tokens a second of one stream for each shape, None being a free one; all are LENGTH tokens long."""
    from quire import SamplingParams

    given = [
        SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=number, ignore_eos=True, structured_outputs=shape)
        for number, shape in enumerate(shapes)
    ]
    prompts = [{"prompt_token_ids": [5 + number, 7, 9, 11]} for number in range(len(shapes))]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, given, use_tqdm=False)
    passed = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / passed


def _shapes(count: int, names: Callable[[int], list[str]]) -> list[Any]:
    """Different schemas of answers that are never complete within LENGTH tokens."""
    from quire.platform.sampling.structured.params import StructuredOutputsParams

    made = []
    for number in range(count):
        fields = {name: {"type": "string", "maxLength": 12} for name in names(number)}
        schema = many(record(fields), minItems=200)
        made.append(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    return made


def _turns(args: argparse.Namespace, work: Path, shapes: list[Any]) -> dict[str, float]:
    llm = _llm(args, work)
    free = [None] * len(shapes)
    _rate(llm, free), _rate(llm, shapes)
    pairs = [(_rate(llm, shapes), _rate(llm, free)) for _ in range(args.rounds)]
    return {
        "shaped": statistics.median(shaped for shaped, _ in pairs),
        "free": statistics.median(plain for _, plain in pairs),
        "ratio": statistics.median(shaped / plain for shaped, plain in pairs),
    }


def streams(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Schemas with short names: most tokens are drawn."""
    found = _turns(args, work, _shapes(STREAMS, lambda number: [f"{chr(97 + number % 26)}{number // 26}"]))
    return {**found, "good": found["ratio"] >= 0.95}


def forced(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A schema with the names that applications have."""
    found = _turns(args, work, _shapes(1, lambda _: ["first_name", "last_name", "occupation", "favourite_color"]))
    return {**found, "good": found["ratio"] >= 1.2}


def main() -> None:
    cases = {"masks": lambda args, work: masks(args), "streams": streams, "forced": forced}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--case", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    good = True
    for name in args.case:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as work:
            found = cases[name](args, Path(work))
        good = good and found.pop("good")
        print(f"{name:8}", "  ".join(f"{what} {value:.4g}" for what, value in found.items()), flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
