"""An engine against transformers: the same weights, the same greedy tokens, the same prompt logprobs.

Sixteen requests of mixed lengths run together with a token budget of 13, the prefix cache on, and a pool so small that
some are preempted; transformers runs each alone.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.models.tiny import build, make

STEPS = 48
REQUESTS = 16


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab) for _ in range(20)]
    return [
        shared[: rng.choice([0, 10, 20])] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 27))]
        for _ in range(REQUESTS)
    ]


def engine(path: Path, blocks: int = 32, **settings: Any) -> LLM:
    # 128 tokens in all: one request may need 94 of them
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        max_num_batched_tokens=13,
        block_size=4,
        num_gpu_blocks_override=blocks,
        debug=True,
        **settings,
    )


@torch.inference_mode()
def by_transformers(
    model: Any, ids: list[int], answer: list[int], token_by_token: bool = False
) -> tuple[list[int], torch.Tensor]:
    """(the greedy token at each place of the answer, log-probabilities [prompt tokens, vocabulary]), run alone.

    token_by_token: as it goes for a user, which matters where frequencies depend on how transformers was called. For
    the others, one pass over prompt and answer says the same: each token is the likeliest after those before it.
    """
    if not token_by_token:
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


def check_greedy(
    oracle: Any, path: Path, *, by_length: bool = False, token_by_token: bool = False, **settings: Any
) -> None:
    """oracle: transformers' model, in the dtype of its arithmetic; path: of the same weights, which the engine runs in
    float32. by_length: rotary frequencies depend on the prompt's length."""
    llm = engine(path, **settings)
    batch = prompts(oracle.config.vocab_size)
    windows = llm.llm_engine.executor.facts.windows
    if 0 not in windows:  # a request soon has all the blocks that it will ever need: here there are fewer
        llm = engine(path, blocks=6 + -(-max(windows) // 4) * 2, **settings)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, prompt_logprobs=1)
    outputs = llm.generate(batch, [scored if i % 4 == 0 else params for i in range(REQUESTS)], use_tqdm=False)
    if 0 in windows or max(windows) > 1:  # of a window of one, an answer's tokens need one block
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if by_length:  # past the threshold, only prompts of one length share blocks
        longest = max(range(REQUESTS), key=lambda i: len(batch[i]))
        first, again = (llm.generate([batch[longest]], params, use_tqdm=False)[0] for _ in range(2))
        assert again.num_cached_tokens > 0
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == outputs[longest].outputs[0].token_ids
    else:
        assert sum(output.num_cached_tokens for output in outputs) > 0
    assert llm.llm_engine.pool.num_owned == 0
    for ids, output in zip(batch, outputs, strict=True):
        answer = output.outputs[0].token_ids
        tokens, scores = by_transformers(oracle, ids, answer, by_length or token_by_token)
        assert len(answer) == _length(llm, len(ids)) and answer == tokens
        for place, known in enumerate(output.prompt_logprobs or [None]):
            if place:
                expected = float(scores[place - 1, ids[place]])
                # Random weights make logprobs of -200, of which float32 has no fourth decimal.
                assert known[ids[place]].logprob == pytest.approx(expected, abs=1e-4, rel=1e-5)


def _length(llm: LLM, prompt: int) -> int:
    """Of an answer: some families' end where the context outgrows the short rotary frequencies."""
    facts = llm.llm_engine.core.executor.facts
    if facts.crosses_threshold or facts.rope_threshold is None or prompt > facts.rope_threshold:
        return STEPS
    return min(STEPS, facts.rope_threshold - prompt + 1)


def check_bfloat16(architecture: str, variant: str, folder: Path) -> None:
    """The mean error of logprobs, against float64, is at most that of transformers' own bf16 run."""
    llm = LLM(
        str(build(architecture, variant, folder)),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_batched_tokens=13,
    )
    rounded = make(architecture, variant).to(torch.bfloat16)
    exact = make(architecture, variant).double()  # its tables of positions have not been rounded
    for parameter, own in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(own.data)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ours, theirs = [], []
    batch = prompts(rounded.config.vocab_size)
    for ids, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
        reference, half = (by_transformers(m, ids, [0])[1] for m in (exact, rounded))
        for place in range(1, len(ids)):
            truth = float(reference[place - 1, ids[place]])
            ours.append(abs(output.prompt_logprobs[place][ids[place]].logprob - truth))
            theirs.append(abs(float(half[place - 1, ids[place]]) - truth))
    assert len(ours) > 200
    assert sum(ours) <= sum(theirs)


def check_forks(path: Path, dtype: str, **settings: Any) -> LLM:
    """Promise 1: requests with forks, in a crowd that is preempted, have the bits that each has alone.

    Returns the crowd's engine.
    """
    rng = random.Random(8)
    batch = [[rng.randrange(97) for _ in range(rng.randint(1, 50))] for _ in range(12)]
    wanted = [
        SamplingParams(n=1 + i % 3, temperature=1.0, seed=i, max_tokens=14, ignore_eos=True, logprobs=2)
        for i in range(12)
    ]

    def run(llm: LLM, chosen: list[int]) -> list[Any]:
        outputs = llm.generate([batch[i] for i in chosen], [wanted[i] for i in chosen], use_tqdm=False)
        assert llm.llm_engine.pool.num_owned == 0
        return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]

    calm = LLM(str(path), dtype=dtype, skip_tokenizer_init=True, enable_prefix_caching=False, **settings)
    tight = LLM(
        str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=24,
        max_num_batched_tokens=11,
        debug=True,
        **settings,
    )
    assert run(tight, list(range(12))) == [run(calm, [i])[0] for i in range(12)]
    assert tight.llm_engine.scheduler.num_preemptions > 0
    return tight
