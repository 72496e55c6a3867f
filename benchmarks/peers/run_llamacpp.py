"""llama.cpp through llama-cpp-python, one stream: run_llamacpp.py MODEL.gguf (to_gguf.py makes it)"""

from __future__ import annotations

import os
import sys

from worker import Requests, Run, serve


def start() -> Run:
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    llm = Llama(sys.argv[1], n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(case: str, requests: Requests) -> None:
        ((token_ids, wanted),) = requests
        llm.reset()
        for count, _ in enumerate(llm.generate(token_ids, temp=0.0), 1):
            if count == wanted:
                break

    return run


if __name__ == "__main__":
    serve(start)
