"""Phi-3 and Phi-3.5-MoE where a context outgrows the short rotary frequencies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, RequestError, SamplingParams
from tests.models.tiny import make, save

ORIGINAL = 24  # of the variant "longrope"


def test_phi_3_5_moe_ends_at_the_original_length(tmp_path: Path) -> None:
    """Beyond it transformers and the published code differ."""
    oracle = make("PhimoeForCausalLM", "as_published")
    llm = LLM(str(save(oracle, tmp_path)), skip_tokenizer_init=True, dtype="float32")
    original = oracle.config.rope_parameters["original_max_position_embeddings"]
    assert original < oracle.config.max_position_embeddings
    with pytest.raises(RequestError, match=str(original)):
        llm.generate([{"prompt_token_ids": [5] * (original + 1)}], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("prompt", [10, ORIGINAL, ORIGINAL + 1, 30])
def test_an_answer_is_that_of_generate_and_ends_where_that_begins_anew(prompt: int, tmp_path: Path) -> None:
    oracle = make("Phi3ForCausalLM", "longrope")
    ids = torch.randint(
        3, oracle.config.vocab_size, (prompt,), generator=torch.Generator().manual_seed(prompt)
    ).tolist()
    theirs = oracle.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    want = theirs[0, prompt:].tolist()
    llm = LLM(str(save(oracle, tmp_path)), skip_tokenizer_init=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
    length = 30 if prompt > ORIGINAL else ORIGINAL - prompt + 1
    assert output.token_ids == want[:length] and output.finish_reason == "length"
