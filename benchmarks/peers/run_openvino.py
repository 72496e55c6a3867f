"""OpenVINO GenAI's continuous batching: run_openvino.py IR_DIR

optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp16 IR_DIR
"""

from __future__ import annotations

import itertools
import sys

from worker import Requests, Run, serve


def start() -> Run:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2, 1024, 64
    scheduler.enable_prefix_caching = False
    numbers = itertools.count()

    def pipeline(precision: str) -> Run:
        pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": precision})

        def run(case: str, requests: Requests) -> None:
            handles = [add(pipe, token_ids, wanted) for token_ids, wanted in requests]
            while pipe.has_non_finished_requests():
                pipe.step()
            for handle, (_, wanted) in zip(handles, requests, strict=True):
                assert len(handle.read_all()[0].generated_ids) == wanted

        run("", [[list(range(10, 42)), 4]])
        return run

    def add(pipe, token_ids, wanted):  # a request whose handle is dropped is cancelled
        import numpy as np
        import openvino as ov

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = wanted, True, False
        return pipe.add_request(next(numbers), ov.Tensor(np.array([token_ids], dtype=np.int64)), config)

    try:
        return pipeline("bf16")
    except RuntimeError as error:  # where the processor has no bf16, its attention takes float32 only
        print(f"OpenVINO refuses bf16 ({str(error).splitlines()[-1]}); float32 instead", file=sys.stderr)
        return pipeline("f32")


if __name__ == "__main__":
    serve(start)
