"""A quantized model on the GPU's kernels, in their emulation: to the bit the model of its rows' numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.models import quantization
from tests.models.test_quantization_plan import as_q8, dequantized, quantized
from tests.platform.conftest import make_llama

BATCH = [[1, 17, 23, 5, 99, 42, 8], [1, 300], [1, *range(40, 90)]]


@pytest.fixture
def answers(engine_on_emulated_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """The tokens of prompts and their logprobs, by a model on the GPU's kernels."""
    monkeypatch.setattr(quantization, "METHODS", {**quantization.METHODS, "test": as_q8})

    def made(path: Path, batch: list[list[int]], **settings: object) -> list[object]:
        llm = LLM(path, skip_tokenizer_init=True, num_gpu_blocks_override=64, debug=True, **settings)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
        return [
            [(one.token_ids, one.logprobs) for one in output.outputs]
            for output in llm.generate(batch, params, use_tqdm=False)
        ]

    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_model_is_that_of_its_numbers(
    answers: Callable[..., list[object]], tmp_path: Path, dtype: str, tied: bool
) -> None:
    make_llama(tmp_path / "own", tie_word_embeddings=tied)
    shutil.copytree(tmp_path / "own", tmp_path / "numbers")
    own, numbers = quantized(tmp_path / "own"), dequantized(tmp_path / "numbers")
    wanted = answers(numbers, BATCH, dtype=dtype)
    assert answers(own, BATCH, dtype=dtype) == wanted
    # By themselves, and in chunks.
    alone = [answers(own, [prompt], dtype=dtype, max_num_batched_tokens=13)[0] for prompt in BATCH]
    assert alone == wanted
