"""quire as a contender: run_quire.py MODEL [--loras DIR] [--no-prefix-caching] [--options JSON]

--options: more of what LLM takes, by name; they replace those of here.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from worker import Requests, Run, serve


def start() -> Run:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--loras")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    from quire import LLM, LoRARequest, RequestOutput, SamplingParams

    options = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": not args.no_prefix_caching,
        "enable_lora": args.loras is not None,
        "max_num_seqs": 64,
        **args.options,
    }
    engine = LLM(args.model, **options).llm_engine
    paths = sorted(Path(args.loras).glob("lora*")) if args.loras else []
    adapters = [LoRARequest(path.name, lora_path=str(path)) for path in paths]
    turns = itertools.count()

    def run(case: str, requests: Requests) -> None:
        turn, made = next(turns), 0
        for index, (token_ids, wanted) in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
            # A salt for each turn: it must not profit from what the turns before have cached.
            prompt = {"prompt_token_ids": token_ids, "cache_salt": str(turn)}
            adapter = adapters[index % len(adapters)] if case == "lora" else None
            engine.add_request(f"{turn}-{index}", prompt, params, adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if isinstance(output, RequestOutput) and output.finished:
                    made += len(output.outputs[0].token_ids)
        assert made == sum(wanted for _, wanted in requests)

    return run


if __name__ == "__main__":
    serve(start)
