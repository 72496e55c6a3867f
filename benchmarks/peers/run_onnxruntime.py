"""ONNX Runtime on a graph that torch exports: run_onnxruntime.py MODEL float32"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from padded import padded_run
from worker import Run, serve


def start() -> Run:
    import onnxruntime
    import torch
    from transformers import AutoModel

    if sys.argv[2] != "float32":
        raise SystemExit("its CPU kernels of BERT are float32's")
    folder = Path(tempfile.mkdtemp())
    model = AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.ones(2, 16, dtype=torch.int64)
    names = ["input_ids", "attention_mask"]
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = {name: {0: batch, 1: length} for name in names}
    torch.onnx.export(
        model, (ids, torch.ones_like(ids)), str(folder / "model.onnx"), input_names=names,
        output_names=["last_hidden_state"], dynamic_shapes=shapes, dynamo=True,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    output = [session.get_outputs()[0].name]

    def forward(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return session.run(output, {"input_ids": ids, "attention_mask": mask})[0]

    return padded_run(sys.argv[1], forward)


if __name__ == "__main__":
    serve(start)
