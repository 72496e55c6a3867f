"""OpenVINO: run_openvino_embeddings.py MODEL DTYPE IR_DIR

optimum-cli export openvino --task feature-extraction --weight-format fp32 --model MODEL IR_DIR
"""

from __future__ import annotations

import sys

import numpy as np
from padded import padded_run
from worker import Run, serve


def start() -> Run:
    import openvino as ov

    hint = {"float32": "f32", "bfloat16": "bf16"}[sys.argv[2]]
    model = ov.Core().read_model(f"{sys.argv[3]}/openvino_model.xml")
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})

    def forward(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return compiled({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})[0]

    return padded_run(sys.argv[1], forward)


if __name__ == "__main__":
    serve(start)
