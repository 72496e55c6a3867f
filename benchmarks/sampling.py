"""What one request's parameters cost another: sampling.py [MODEL] [--case WORD] [--dtype D] [--rounds N] [--json]

A client's single stream beside one request of 63 sequences, in steps of the engine: its median step beside each hostile
request, over its median step beside 63 plain sequences (temperature 1 and nothing else, but text where the hostile ones
have it), measured in turns. No case may be above 1.10. The same is shown of the CPU time of the engine's thread, which
other programs disturb less. Without MODEL, the bundled one, whose steps are so short that what is not the model's shows
most. --case: those alone whose name has this word.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

SEQUENCES, WARM_UP, STEPS = 63, 4, 40
LIMIT = 1.10
Times = tuple[float, float]  # seconds that passed, and that the thread computed
PROMPT = list(range(3, 19))


def hostile(vocab: int, longest: int, tokenizer: Any) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """(prompt, parameters) by name: as many as a request may have, of each kind of list."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    same = "a" * 80
    token = tokenizer.encode(same, add_special_tokens=False)[-2]
    starts = f"{letters}{letters.upper()}0123456789 ."
    long = [3 + number % (min(vocab, 1024) - 4) for number in range(longest)]  # no image token
    return {
        "allowed_token_ids, 300,000": (PROMPT, {"allowed_token_ids": [5, 6, 7] * 100_000}),
        "allowed_token_ids, all": (PROMPT, {"allowed_token_ids": range(vocab)}),
        "logit_bias, all": (PROMPT, {"logit_bias": {token: token % 7 * 0.1 for token in range(vocab)}}),
        "bad_words, 1,024": (PROMPT, {"bad_words": [f"{a} {b}{a}" for a in letters for b in letters * 2][:1024]}),
        "bad_words that match": (
            PROMPT,
            {"bad_words": [same[:size] + "z" for size in range(1, 80)], "logit_bias": {token: 100}},
        ),
        "repetition_penalty, long prompt": (long, {"repetition_penalty": 1.2}),
        "all penalties": (
            long,
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        ),
        "min_tokens, stop_token_ids": (
            PROMPT,
            {"min_tokens": 200, "stop_token_ids": range(3, min(vocab, 1027))},
        ),
        "stop, 64 of 1,024 characters": (
            PROMPT,
            {"stop": [start + "e" * 1022 + "\0" for start in starts], "detokenize": True},
        ),
        "stop strings that match": (
            PROMPT,
            {"stop": ["a" * size + "\0" for size in range(960, 1024)], "logit_bias": {token: 100}, "detokenize": True},
        ),
    }


class Bench:
    def __init__(self, model: str | None, dtype: str) -> None:
        from quire import LLM

        self.llm = LLM(model, dtype=dtype, max_num_seqs=SEQUENCES + 1, enable_prefix_caching=False)
        self.engine = self.llm.llm_engine
        self.vocab = self.engine.limits.vocab_size
        self._serial = 0

    def median_step(self, prompt: list[int], parameters: dict[str, Any], sequences: int = SEQUENCES) -> Times:
        """Of a step with a client's stream and these sequences beside it."""
        from quire import SamplingParams

        self._serial += 1
        names = [f"client {self._serial}", f"other {self._serial}"]
        common = {"ignore_eos": True, "detokenize": False, "max_tokens": 200}
        self.engine.add_request(names[0], {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, **common))
        if sequences:
            params = SamplingParams(**{"n": sequences, "seed": 1, **common, **parameters})
            self.engine.add_request(names[1], {"prompt_token_ids": prompt}, params)
        while len(self.engine.scheduler.running) < 1 + sequences:  # until the prompt is computed and has forked
            self.engine.step()
        times = []
        for number in range(WARM_UP + STEPS):
            begin, computed = time.perf_counter(), time.thread_time()
            self.engine.step()
            if number >= WARM_UP:
                times.append((time.perf_counter() - begin, time.thread_time() - computed))
        self.engine.abort_request(names)
        self.engine.step()
        return statistics.median(passed for passed, _ in times), statistics.median(spent for _, spent in times)


def compare(bench: Bench, rounds: int, word: str = "") -> list[dict[str, Any]]:
    """Each case beside plain sequences with the same prompt; medians of ratios that were taken in turns."""
    longest = min(bench.engine.limits.max_model_len // 2, 4096)
    report = []
    for name, (prompt, parameters) in hostile(bench.vocab, longest, bench.llm.get_tokenizer()).items():
        if word not in name:
            continue
        pairs = []
        for _ in range(rounds):
            plain = bench.median_step(prompt, {"detokenize": parameters.get("detokenize", False)})
            pairs.append((bench.median_step(prompt, parameters), plain))
        row = {
            "case": name,
            "plain_ms": 1e3 * statistics.median(plain[0] for _, plain in pairs),
            "hostile_ms": 1e3 * statistics.median(own[0] for own, _ in pairs),
            "ratio": statistics.median(own[0] / plain[0] for own, plain in pairs),
            "cpu_ratio": statistics.median(own[1] / plain[1] for own, plain in pairs),
        }
        report.append(row)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--case", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.model, options.dtype)
    alone = 1e3 * bench.median_step(PROMPT, {}, 0)[0]
    report = compare(bench, options.rounds, options.case)
    if options.json:
        print(json.dumps({"alone_ms": alone, "cases": report}, indent=2))
    else:
        print(f"a client's median step: alone {alone:.2f} ms; beside {SEQUENCES} sequences of one other request")
        for row in report:
            print(f"  {row['case']:32s} {row['hostile_ms']:7.2f} ms, plain {row['plain_ms']:7.2f} ms: "
                  f"{row['ratio']:.2f} x (limit {LIMIT:.2f}), {row['cpu_ratio']:.2f} x the CPU time")  # fmt: skip
    sys.exit(any(row["ratio"] > LIMIT for row in report))


if __name__ == "__main__":
    main()
