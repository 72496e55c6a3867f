"""The engine against transformers: the same weights, the same greedy tokens, the same prompt logprobs.

Sixteen requests of mixed lengths run together with a token budget of 13, the prefix cache on, and a pool so small that
some are preempted; transformers runs each alone.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from tests.models.tiny import build, cases, make

STEPS = 48
REQUESTS = 16


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab) for _ in range(20)]
    return [
        shared[: rng.choice([0, 10, 20])] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 27))]
        for _ in range(REQUESTS)
    ]


def engine(path) -> LLM:
    # 128 tokens in all: one request may need 94 of them
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        max_num_batched_tokens=13,
        block_size=4,
        num_gpu_blocks_override=32,
        debug=True,
    )


# Their frequencies depend on how transformers was called, so it must go token by token, as it does for a user. For
# the others, one pass over prompt and answer says the same: each token is the likeliest after those before it.
BY_LENGTH = {"rope_dynamic", "rope_longrope", "rope_longrope_short"}
TOKEN_BY_TOKEN = BY_LENGTH | {"gqa", "pre_norm", "gelu_new"}


@torch.inference_mode()
def by_transformers(model, ids: list[int], answer: list[int], variant: str) -> tuple[list[int], torch.Tensor]:
    """(the greedy token at each place of the answer, log-probabilities [prompt tokens, vocabulary]), run alone."""
    if variant not in TOKEN_BY_TOKEN:
        logits = model(torch.tensor([ids + answer[:-1]])).logits[0]
        return logits[len(ids) - 1 :].argmax(-1).tolist(), logits[: len(ids)].double().log_softmax(-1)
    fresh = copy.deepcopy(model)  # length-dependent rotary embeddings remember earlier calls
    step = fresh(torch.tensor([ids]), use_cache=True)
    scores = step.logits[0].double().log_softmax(-1)
    tokens = [int(step.logits[0, -1].argmax())]
    while len(tokens) < len(answer):
        step = fresh(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        tokens.append(int(step.logits[0, -1].argmax()))
    return tokens, scores


@pytest.mark.parametrize(("architecture", "variant"), cases(), ids=lambda value: value)
def test_greedy_tokens_and_prompt_logprobs(architecture, variant, tmp_path):
    # In float64: what transformers computes, without its own rounding. The engine runs in float32.
    # (reorder_and_upcast_attn itself insists on float32.)
    oracle = make(architecture, variant)
    if variant != "reorder_and_upcast":
        oracle = oracle.double()
    llm = engine(build(architecture, variant, tmp_path))
    batch = prompts(oracle.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, prompt_logprobs=1)
    outputs = llm.generate(batch, [scored if i % 4 == 0 else params for i in range(REQUESTS)], use_tqdm=False)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if variant not in BY_LENGTH:  # past the threshold, only prompts of one length share blocks
        assert sum(output.num_cached_tokens for output in outputs) > 0
    assert llm.llm_engine.pool.num_owned == 0
    for ids, output in zip(batch, outputs, strict=True):
        answer = output.outputs[0].token_ids
        tokens, scores = by_transformers(oracle, ids, answer, variant)
        assert len(answer) == STEPS and answer == tokens
        for place, known in enumerate(output.prompt_logprobs or [None]):
            if place:
                expected = float(scores[place - 1, ids[place]])
                # Random weights make logprobs of -200, of which float32 has no fourth decimal.
                assert known[ids[place]].logprob == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_beams_equal_those_of_transformers(tmp_path):
    oracle = make("LlamaForCausalLM", "gqa")
    llm = engine(build("LlamaForCausalLM", "gqa", tmp_path))
    batch = prompts(oracle.config.vocab_size)[:6]
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


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel"])
def test_bf16_is_as_close_to_float64_as_transformers_is(architecture, tmp_path):
    """The mean error of logprobs is at most that of transformers' own bf16 run."""
    variant = next(v for a, v in cases() if a == architecture)
    llm = LLM(
        str(build(architecture, variant, tmp_path)),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_batched_tokens=13,
    )
    rounded = make(architecture, variant).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).double()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ours, theirs = [], []
    batch = prompts(rounded.config.vocab_size)
    for ids, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
        reference, half = (by_transformers(m, ids, [0], "")[1] for m in (exact, rounded))
        for place in range(1, len(ids)):
            truth = float(reference[place - 1, ids[place]])
            ours.append(abs(output.prompt_logprobs[place][ids[place]].logprob - truth))
            theirs.append(abs(float(half[place - 1, ids[place]]) - truth))
    assert len(ours) > 200
    assert sum(ours) <= sum(theirs)
