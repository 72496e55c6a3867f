"""Draft tokens change how long an answer takes, and no bit of it, wherever they come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.demo import adapter_path, picture_path
from quire.errors import QuireError
from quire.platform.outputs.outputs import CompletionOutput
from quire.platform.sampling.params import BeamSearchParams
from quire.platform.sampling.speculative.lengths import StepCost
from quire.platform.sampling.speculative.lookup import Proposal
from quire.platform.scheduling.drafting import Drafting
from tests.models.tiny import build
from tests.platform.engine.test_promise import answers, params, prompts

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


class Free(StepCost):
    """Of a machine on which further tokens cost nothing: all drafts are taken."""

    def line(self) -> tuple[float, float]:
        return 1.0, 0.0


class Clairvoyant:
    """Proposes what is going to come, and at some places something else: `known` are whole sequences."""

    def __init__(self, known: Iterable[Sequence[int]], seed: int, right: float) -> None:
        self.known = [tuple(one) for one in known]
        self.rng = random.Random(seed)
        self.right = right
        self.asked = 0

    def propose(self, sequence_id: int, token_ids: Sequence[int], root: bytes, most: int) -> Proposal:
        self.asked += 1
        length = len(token_ids)
        coming = next((one[length:] for one in self.known if one[:length] == tuple(token_ids)), ())
        count = self.rng.randint(0, most)
        tokens = [
            (coming[i] if i < len(coming) else 5) if self.rng.random() < self.right else self.rng.randrange(3, 90)
            for i in range(count)
        ]
        return Proposal(tuple(tokens), 8)

    def end(self, sequence_id: int, output_ids: Sequence[int], root: bytes) -> None:
        pass


def give_drafts(llm: LLM, known: Iterable[Sequence[int]], seed: int = 0, right: float = 0.8, most: int = 6) -> Drafting:
    """Let an engine have the drafts of somebody who knows the answers."""
    drafting = Drafting(Clairvoyant(known, seed, right), most, llm.llm_engine.limits.vocab_size, Free())
    llm.llm_engine.scheduler.drafting = drafting
    return drafting


def told(llm: LLM, batch: Sequence[Any], wanted: Sequence[SamplingParams], adapters: Any = None) -> list[tuple]:
    """All that the callers get."""
    outputs = llm.generate(list(batch), list(wanted), use_tqdm=False, lora_request=adapters)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0

    def completion(one: CompletionOutput) -> tuple:
        return one.text, one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason, one.stop_reason

    return [(one.prompt_token_ids, one.prompt_logprobs, [completion(c) for c in one.outputs]) for one in outputs]


def sequences_of(results: Iterable[tuple]) -> list[list[int]]:
    return [[*prompt, *tokens] for prompt, _, completions in results for _, tokens, *_ in completions]


def of_tokens(batch: Iterable[Sequence[int]]) -> list[dict]:
    return [{"prompt_token_ids": list(ids)} for ids in batch]


# -- any parameters, any cut, any proposals ----------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -5.0}},
    {"temperature": 0.8, "allowed_token_ids": list(range(3, 60)), "bad_words": ["a", "e"]},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": list(range(0, 384, 5))},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{4,12}c?"), "skip": "ignore_eos"},
    {
        "temperature": 0.9,
        "structured_outputs": StructuredOutputsParams(choice=["red circle", "red square", "blue"]),
        "skip": "ignore_eos",
    },
]


def wanted_params(kind: int, index: int, length: int, logprobs: int | None, stop: bool) -> SamplingParams:
    own = dict(KINDS[kind])
    more: dict[str, Any] = {"ignore_eos": True} if own.pop("skip", "") != "ignore_eos" else {}
    if stop:
        more["stop"] = ["e", "th", " a"]
    if index % 6 == 5:
        more["prompt_logprobs"] = 1
    length = max(length, own.get("min_tokens", 1))
    return SamplingParams(max_tokens=length, seed=index, logprobs=logprobs, **own, **more)


@pytest.fixture(scope="module")
def engines(tiny_path) -> Callable[..., LLM]:
    """Engines by their settings, each made once."""
    made: dict[tuple, LLM] = {}

    def engine(**given: Any) -> LLM:
        key = tuple(sorted(given.items()))
        if key not in made:
            made[key] = LLM(str(tiny_path), debug=True, **given)
        return made[key]

    return engine


requests = st.lists(
    st.tuples(
        st.integers(0, len(KINDS) - 1),
        st.integers(0, 31),
        st.integers(1, 24),
        st.sampled_from([None, 0, 2]),
        st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


# Without shrinking, which makes hundreds of runs of a failure that is as plain in its first form.
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    chosen=requests,
    seed=st.integers(0, 1000),
    right=st.sampled_from([0.0, 0.6, 0.95, 1.0]),
    most=st.sampled_from([1, 3, 8]),
    cut=st.sampled_from(["whole", "chunks", "small pool", "one at a time"]),
)
def test_any_drafts_give_the_same_answers(engines, chosen, seed, right, most, cut):
    more = {"whole": {}, "chunks": {"max_num_batched_tokens": 9}, "small pool": {"num_gpu_blocks_override": 24},
            "one at a time": {"max_num_seqs": 1, "block_size": 1}}[cut]  # fmt: skip
    batch = of_tokens(prompts()[index] for _, index, *_ in chosen)
    wanted = [wanted_params(*one) for one in chosen]
    expected = told(engines(), batch, wanted)
    llm = engines(**more)
    drafting = give_drafts(llm, sequences_of(expected), seed, right, most)
    assert told(llm, batch, wanted) == expected
    assert drafting.num_accepted_tokens <= drafting.num_draft_tokens
    if right == 0.0:
        assert drafting.num_accepted_tokens <= drafting.num_drafts * 2, "wrong drafts are right by chance at most"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "more", [{}, {"max_num_batched_tokens": 13}, {"num_gpu_blocks_override": 30}, {"block_size": 1}]
)
def test_looking_up_gives_the_same_answers(tiny_path, method, more):
    expected = answers(LLM(str(tiny_path)), list(range(32)))
    llm = LLM(str(tiny_path), speculative_config={"method": method}, debug=True, **more)
    for _ in range(2):  # the second time with prefix hits, and answers to be found
        assert answers(llm, list(range(32))) == expected
    if "num_gpu_blocks_override" in more:
        assert llm.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_made_and_accepted(method):
    """The bundled model tells a story that it was told three times; the numbers are what `get_metrics` says."""
    story = "Once upon a time there was a red circle. The red circle went to the castle. " * 3
    wanted = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, logprobs=1)
    expected = told(LLM(), [story], [wanted])
    llm = LLM(speculative_config={"method": method, "num_speculative_tokens": 5})
    drafting = llm.llm_engine.scheduler.drafting
    drafting._cost = Free()  # else the machine's times would say how many there are
    output = llm.generate(story, wanted, use_tqdm=False)[0]
    assert 10 < output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens
    first = drafting.num_accepted_tokens
    assert told(llm, [story], [wanted]) == expected
    if method == "suffix":  # the answer was given before
        assert drafting.num_accepted_tokens - first > 50 > first
    counts = {one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:spec_decode")}
    assert counts == {
        "vllm:spec_decode_num_drafts": drafting.num_drafts,
        "vllm:spec_decode_num_draft_tokens": drafting.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": drafting.num_accepted_tokens,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_other_dtypes(tiny_path, dtype, kv):
    more = {"dtype": dtype, "kv_cache_dtype": kv}
    batch, wanted = of_tokens(prompts()[:8]), [params(i) for i in range(8)]
    expected = told(LLM(str(tiny_path), **more), batch, wanted)
    llm = LLM(str(tiny_path), debug=True, **more)
    assert give_drafts(llm, sequences_of(expected)) and told(llm, batch, wanted) == expected


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("Gemma3ForCausalLM", "as_published"), ("MistralForCausalLM", "window"), ("GPT2LMHeadModel", "gelu_new")],
)
def test_windows_and_other_architectures(tmp_path, architecture, variant):
    path = str(build(architecture, variant, tmp_path))
    rng = random.Random(8)
    batch = of_tokens([[rng.randrange(3, 90) for _ in range(rng.randint(1, 30))] for _ in range(5)])
    wanted = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)] * 5
    more = {"skip_tokenizer_init": True, "block_size": 4}
    expected = told(LLM(path, **more), batch, wanted)
    for cut in ({}, {"max_num_batched_tokens": 7}, {"num_gpu_blocks_override": 40}):
        llm = LLM(path, debug=True, **more, **cut)
        drafting = give_drafts(llm, sequences_of(expected))
        assert told(llm, batch, wanted) == expected
        assert drafting.num_accepted_tokens > 10


def test_without_recorded_steps_and_in_another_process(tiny_path):
    batch, wanted = of_tokens(prompts()[:6]), [params(i) for i in range(6)]
    expected = told(LLM(str(tiny_path)), batch, wanted)
    for more in ({"enforce_eager": True}, {"executor": "process"}):
        llm = LLM(str(tiny_path), debug=True, **more)
        drafting = give_drafts(llm, sequences_of(expected))
        assert told(llm, batch, wanted) == expected
        assert drafting.num_accepted_tokens > 10
        llm.llm_engine.close()


def test_adapters_and_images_verify_with_their_own():
    """The bundled model, with its adapters and a picture, in one batch."""
    from PIL import Image

    picture = Image.open(picture_path())
    texts = ["Once upon a time", "One day, a red circle", "Once upon a time"]
    seen = {"prompt": "<|image|>\nWhat do you see?", "multi_modal_data": {"image": picture}}
    batch: list[Any] = [*texts, seen, seen, seen]
    adapters = [
        None,
        LoRARequest("french", 1, adapter_path("french")),
        LoRARequest("shout", 2, adapter_path("shout")),
    ] * 2
    wanted = [SamplingParams(temperature=0 if i % 2 else 0.8, seed=i, max_tokens=30, logprobs=1) for i in range(6)]
    expected = told(LLM(enable_lora=True), batch, wanted, adapters)
    llm = LLM(enable_lora=True, debug=True)
    drafting = give_drafts(llm, sequences_of(expected))
    assert told(llm, batch, wanted, adapters) == expected
    assert drafting.num_accepted_tokens > 20
    # A picture's placeholders stand in the prompt as their ids, and are matched with themselves.
    looking_up = LLM(enable_lora=True, speculative_config={"method": "suffix"}, debug=True)
    for _ in range(2):
        assert told(looking_up, batch, wanted, adapters) == expected


def test_beams_have_none(tiny_path):
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    batch = [{"prompt_token_ids": [5, 6, 5, 6]}]
    llm = LLM(str(tiny_path), speculative_config=NGRAM, debug=True)
    expected = LLM(str(tiny_path)).beam_search(batch, beams)[0].sequences
    assert [one.tokens for one in llm.beam_search(batch, beams)[0].sequences] == [one.tokens for one in expected]
    assert llm.llm_engine.scheduler.drafting.num_drafts == 0


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_half_way_is_run_again(tiny_path, monkeypatch):
    """What a step has taken of its drafts before it failed is forgotten when its chunks are run one by one."""
    from quire.platform.sampling.speculative import check

    batch, wanted = of_tokens(prompts()[:5]), [params(i) for i in range(5)]
    expected = told(LLM(str(tiny_path)), batch, wanted)
    llm = LLM(str(tiny_path), debug=True)
    drafting = give_drafts(llm, sequences_of(expected), right=1.0)
    draw, calls = check._draw_one_by_one, []

    def failing(logits, groups, likeliest):
        drawn = draw(logits, groups, likeliest)
        calls.append(1)
        if len(calls) % 3 == 1:
            raise RuntimeError("a fault of the machine")
        return drawn

    monkeypatch.setattr(check, "_draw_one_by_one", failing)
    got = told(llm, batch, wanted)
    failed = [i for i, one in enumerate(got) if one[2][0][4] == "error"]
    assert [one for i, one in enumerate(got) if i not in failed] == [
        one for i, one in enumerate(expected) if i not in failed
    ]
    assert len(failed) < 5 and len(calls) > 5 and drafting.num_accepted_tokens > 0


def test_aborts_at_any_moment(tiny_path):
    llm = LLM(str(tiny_path), num_gpu_blocks_override=40, debug=True)
    engine, rng = llm.llm_engine, random.Random(5)
    expected = told(LLM(str(tiny_path)), of_tokens(prompts()), [params(i) for i in range(32)])
    drafting = give_drafts(llm, sequences_of(expected))
    alive: set[str] = set()
    number = 0
    while number < 150 or engine.has_unfinished_requests():
        if number < 150 and rng.random() < 0.4:
            engine.add_request(str(number), {"prompt_token_ids": prompts()[number % 32]}, params(number % 32))
            alive.add(str(number))
        if alive and rng.random() < 0.1:
            gone = rng.choice(sorted(alive))
            engine.abort_request(gone)
            alive.discard(gone)
        for output in engine.step():
            if output.finished:
                alive.discard(output.request_id)
                assert output.outputs[0].token_ids == expected[int(output.request_id) % 32][2][0][1]
        number += 1
    assert engine.pool.num_owned == 0 and drafting.num_accepted_tokens > 10 and not drafting._watched


# -- what can be asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("ngram", "must be an object"),
        ({"method": "eagle"}, "is ngram or suffix"),
        ({"method": "eagle", "model": "there"}, "or draft_model, with one"),
        ({"method": "draft_model"}, "or draft_model, with one"),
        ({"model": "there", "prompt_lookup_min": 3}, "no use for it"),
        ({"model": 5}, "must be a text"),
        ({"method": "ngram", "revision": "main"}, "no use for it"),
        ({"model": "/not/there"}, "model='/not/there': "),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "lower the first"),
        ({"method": "ngram", "prompt_lookup": 5}, "is unknown"),
        ({"method": "ngram", "disable_by_batch_size": 5}, "by themselves"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "one process"),
    ],
)
def test_what_is_refused(tiny_path, given, why):
    with pytest.raises(QuireError, match=why):
        LLM(str(tiny_path), speculative_config=given)


@pytest.mark.parametrize(
    "taken",
    [
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1},
        {"method": "ngram", "prompt_lookup_min": 12, "draft_tensor_parallel_size": 1, "model": None},
        {},
    ],
)
def test_what_is_taken_as_vllm_has_it(tiny_path, taken):
    assert LLM(str(tiny_path), speculative_config=taken).llm_engine.scheduler.drafting is not None


def test_a_model_with_states_is_refused(tmp_path):
    path = str(build("FalconH1ForCausalLM", "as_published", tmp_path))
    with pytest.raises(QuireError, match="keep a state"):
        LLM(path, skip_tokenizer_init=True, speculative_config=NGRAM)
