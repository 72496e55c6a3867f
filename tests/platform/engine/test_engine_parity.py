"""The engine against transformers: beams, and bfloat16. Greedy tokens and prompt logprobs are compared for every row
(`tests/models/rows/test_rows.py`)."""

from __future__ import annotations

import pytest
import torch

from quire import BeamSearchParams
from tests.models.tiny import build, cases, make
from tests.platform.engine.parity import check_bfloat16, engine, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


def test_beams_equal_those_of_transformers(tmp_path):
    oracle = make("LlamaForCausalLM", "gqa")
    llm = engine(build("LlamaForCausalLM", "gqa", tmp_path))
    batch = prompts(oracle.config.vocab_size)[:3]
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    for ids, output in zip(batch, llm.beam_search(batch, params), strict=True):
        expected = oracle.generate(
            torch.tensor([ids]), num_beams=4, num_return_sequences=4, max_new_tokens=12, min_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [beam.tokens for beam in output.sequences] == expected.sequences.tolist()
        totals = [12 * float(score) for score in expected.sequences_scores]
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx(totals, abs=1e-3)
    assert llm.llm_engine.pool.num_owned == 0


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Qwen2ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel")
        ),
    ],
)
def test_bf16_is_as_close_to_float64_as_transformers_is(architecture, tmp_path):
    check_bfloat16(architecture, next(v for a, v in cases() if a == architecture), tmp_path)
