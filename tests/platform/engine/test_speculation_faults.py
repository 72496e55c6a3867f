"""Drafts beside what goes wrong: interrupts, rows that cannot be drawn, placeholders, requests that wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from tests.multimodal.open_engine import KINDS, ask, greedy, open_llm, prompt
from tests.multimodal.tiny_vision import build as build_vision
from tests.multimodal.tiny_vision import picture
from tests.platform.engine.test_promise import prompts
from tests.platform.engine.test_speculation import Free, give_drafts, of_tokens, sequences_of, told


def test_a_step_whose_drafts_were_taken_is_interrupted_and_planned_anew_without_drafts(tiny_path):
    """Position, penalties and processors of the tokens that come then are those of what was committed."""
    plain, llm = LLM(str(tiny_path)), LLM(str(tiny_path), debug=True)
    engine = llm.llm_engine
    execute, interrupts = engine.executor.execute, 0
    batch = of_tokens(prompts()[:1])
    for seed in range(8):
        wanted = SamplingParams(temperature=1.3, seed=seed, max_tokens=14, ignore_eos=True, presence_penalty=1.5)
        expected = told(plain, batch, [wanted])
        drafting = give_drafts(llm, sequences_of(expected), seed, right=1.0)
        choose, due = drafting.choose, [True]

        def interrupted(plan, due=due):
            execution = execute(plan)
            if due and any(len(chunk.drafts) > 1 for chunk in plan.chunks):
                due.clear()
                raise KeyboardInterrupt
            return execution

        engine.executor.execute = interrupted
        engine.add_request(str(seed), batch[0], wanted)
        tokens = []
        while engine.has_unfinished_requests():
            try:
                for output in engine.step():
                    tokens = output.outputs[0].token_ids
            except KeyboardInterrupt:
                interrupts += 1
                drafting.choose = lambda *_: {}
                engine.step()
                drafting.choose = choose
        assert tokens == expected[0][2][0][1]
        engine.executor.execute = execute
    assert interrupts > 2


def test_a_row_that_cannot_be_drawn_hides_no_token_before_it(tiny_path):
    """An error comes behind what was accepted in the same step, and after its text."""
    batch = of_tokens(prompts()[:1])
    whole = told(LLM(str(tiny_path)), batch, [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)])
    position = len(batch[0]["prompt_token_ids"]) + 6
    wanted = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)]

    def spoiled(**settings: object) -> LLM:
        llm = LLM(str(tiny_path), enforce_eager=True, **settings)
        model = llm.llm_engine.executor.runner.model
        forward = model.forward

        def spoil(embeddings, context, caches):
            hidden = forward(embeddings, context, caches).clone()
            positions = context.positions if context.wanted is None else context.positions[context.wanted]
            hidden[positions == position] = torch.nan
            return hidden

        model.forward = spoil
        return llm

    expected = told(spoiled(), batch, wanted)
    assert expected[0][2][0][4] == "error"
    llm = spoiled(debug=True)
    drafting = give_drafts(llm, sequences_of(whole), right=1.0)
    assert told(llm, batch, wanted) == expected
    assert drafting.num_accepted_tokens > 0


@pytest.mark.parametrize("eager", [False, True])
def test_placeholders_outside_the_vocabulary_are_no_drafts(tmp_path, eager):
    kind = next(one for one in KINDS if one.name == "llava")
    path = Path(build_vision(kind.architecture, kind.variant, tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "image_token_index": 400}))
    given = prompt([7, 7, 400, 6], [picture(1, (24, 24))])
    wanted = greedy(12, logit_bias={7: 100.0})
    expected = ask(open_llm(str(path)), given, wanted)[0].outputs[0]
    llm = open_llm(str(path), speculative_config={"method": "ngram"}, enforce_eager=eager)
    llm.llm_engine.scheduler.drafting._cost = Free()
    found = ask(llm, [given, prompt([5, 6])], [wanted, greedy(12)])[0].outputs[0]
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason) and found.token_ids


def test_whoever_waits_is_admitted_before_drafts_are_made(tiny_path):
    batch = of_tokens(prompts()[:2])
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = told(LLM(str(tiny_path)), batch[:1], [long])
    llm = LLM(str(tiny_path), max_num_batched_tokens=8, debug=True)
    engine = llm.llm_engine
    drafting = give_drafts(llm, sequences_of(expected), right=1.0, most=16)
    drafting._proposer.rng.randint = lambda least, most: most  # else a step may have room by chance
    engine.add_request("old", batch[0], long)
    while not drafting.num_drafts:
        engine.step()
    engine.add_request("new", batch[1], SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(2 + len(batch[1]["prompt_token_ids"])):
        if "new" in [output.request_id for output in engine.step() if output.finished]:
            break
    else:
        pytest.fail("the request waited while drafts took the whole step")
