"""Where vectors are of some rows of a step, these alone are computed at its end, and it is replayed from a recording
where one can be made: the bits that all rows have, computed from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, kernels
from tests.models import tiny
from tests.models.pooling import test_bert, test_decoders, test_modernbert, test_rotary_encoders
from tests.models.pooling.worlds import engine, given, prompts, saved
from tests.models.rows.checks import recorded_steps

LENGTHS = (2, 3, 60, 17, 41, 9, 30, 55, 2, 20)
KINDS = ("CLS", "LAST", "MEAN")
# What a window on both sides lets tokens see, and biases by distance, are worked out in torch.
IN_PYTHON = {"MPNet", "ModernBert"}
# All rows are computed of models that are not `models/decoder.py`'s, nor encoders' alone.
WHOLE = {"MPNet", "BloomForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "PhiForCausalLM"}


def bert(family: str, variant: str) -> Any:
    return getattr(transformers, f"{family}Model")(test_bert.config(family, variant))


def with_windows(family: str, variant: str) -> Any:
    return test_modernbert.made(family, "Model", variant)


def rotary(family: str, variant: str) -> Any:
    return test_rotary_encoders.made(family, "Model", variant)


def decoder(architecture: str, variant: str) -> Any:
    return test_decoders.bare(architecture, variant).base_model


def first_of(families: Any) -> list[tuple[str, str]]:
    return [(family, next(iter(variants))) for family, variants in families.items()]


CASES = [
    *((bert, *case) for case in test_bert.CASES),
    *((with_windows, *case) for case in first_of(test_modernbert.FAMILIES)),
    *((rotary, family, "plain") for family in test_rotary_encoders.OWN),
    *((decoder, *case) for case in first_of(test_decoders.EMBEDDERS)),
]


def vectors(llm: LLM, batch: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(one.outputs.embedding) for one in llm.embed(given(batch), use_tqdm=False)]


@pytest.mark.parametrize(("make", "family", "variant"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits(make: Callable[[str, str], Any], family: str, variant: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    oracle = saved(make(family, variant), tmp_path)
    batch = prompts(min(tiny.VOCAB, oracle.config.vocab_size), LENGTHS) * 2
    for kind in KINDS:
        more: dict[str, Any] = {"pooler_config": {"pooling_type": kind}, "dtype": dtype, "runner": "pooling"}
        more |= {"max_num_batched_tokens": 70, "num_gpu_blocks_override": 300, "enable_prefix_caching": False}
        eager, llm = engine(tmp_path, enforce_eager=True, **more), engine(tmp_path, **more)
        narrowed = vectors(eager, batch)
        forward = eager.llm_engine.executor.runner._forward
        assert forward._narrows is (family not in WHOLE)
        forward._narrows = False
        expected = vectors(eager, batch)
        for found in (narrowed, *(vectors(llm, batch) for _ in range(3))):
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        if kernels.backend().__name__ == "quire.kernels.native":
            assert bool(recorded_steps(llm)) is (family not in IN_PYTHON)
            one_row = kind != "MEAN" and family not in WHOLE
            assert all(bool(shape.wanted) is one_row for shape in recorded_steps(llm))
