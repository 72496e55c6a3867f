"""Plug-ins that change logits: named by the operator, asked for by requests, and harmless to their neighbours."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, BitMask, LogitsProcessor, QuireError, RequestError, SamplingParams, TokenMask
from quire.platform.sampling.logits_processors import ProcessorRequest, build_chain, load_plugins
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState
from tests.platform.sampling import masks
from tests.platform.sampling.specs import processed

HERE = "tests.platform.sampling.masks"
PROMPT = {"prompt_token_ids": [5, 9, 5, 11]}
OTHERS = {"prompt_token_ids": [7, 8, 300]}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    """With all of them but those that are for every request; debug runs check each row."""
    names = [f"{HERE}:{name}" for name in ("Cycle", "Together", "Faulty")]
    yield LLM(
        str(tiny_path), num_gpu_blocks_override=64, max_num_seqs=16, debug=True,
        logits_processors=[*names, masks.Leaky],
    )  # fmt: skip


def asking(**extra_args: Any) -> SamplingParams:
    return SamplingParams(**GREEDY, extra_args=extra_args)


def tokens(llm: LLM, *pairs: tuple[Any, SamplingParams]) -> list[Any]:
    outputs = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False)
    return [
        [list(one.token_ids) for one in output.outputs] if output.failure is None else str(output.failure)
        for output in outputs
    ]


PLAIN = [(OTHERS, SamplingParams(**GREEDY)), (OTHERS, SamplingParams(**DRAWN, n=3)), (PROMPT, SamplingParams(**DRAWN))]


# -- what they do ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ids", "bools", "bits"])
def test_a_mask_says_what_comes_next(llm: LLM, how: str) -> None:
    assert tokens(llm, (PROMPT, asking(cycle=[7, 3, 300], how=how))) == [[[7, 3, 300] * 3]]


def test_a_mask_may_allow_everything(llm: LLM) -> None:
    assert tokens(llm, (PROMPT, asking(cycle=[7], how="all"))) == tokens(llm, (PROMPT, SamplingParams(**GREEDY)))


def test_every_sequence_of_a_request_has_its_own(llm: LLM) -> None:
    params = SamplingParams(**DRAWN, n=4, extra_args={"cycle": [7, 3]})
    assert tokens(llm, (PROMPT, params)) == [[[7, 3, 7, 3, 7, 3, 7, 3, 7]] * 4]


def test_rows_are_the_same_alone_and_in_a_crowd(llm: LLM) -> None:
    """Neighbours with and without plug-ins, with penalties, several sequences."""
    pairs = [
        *PLAIN,
        (PROMPT, asking(cycle=[9, 8, 7])),
        (OTHERS, SamplingParams(**DRAWN, n=2, repetition_penalty=1.3, extra_args={"together": 40})),
        (PROMPT, SamplingParams(**DRAWN, presence_penalty=0.5, bad_words=["a"], extra_args={"together": 41})),
        (OTHERS, asking(together=42, cycle=[42, 43], how="all")),
    ]
    alone = [tokens(llm, pair)[0] for pair in pairs]
    assert tokens(llm, *pairs) == alone
    assert tokens(llm, *reversed(pairs)) == alone[::-1]


def test_a_sequence_that_is_preempted_goes_on(tiny_path: Path) -> None:
    few = LLM(
        str(tiny_path), block_size=4, num_gpu_blocks_override=12, enable_prefix_caching=False, debug=True,
        logits_processors=[masks.Cycle],
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args={"cycle": [7, 3, 300]})
    answers = tokens(few, *[({"prompt_token_ids": [5, 9, n]}, params) for n in range(3)])
    assert few.llm_engine.scheduler.num_preemptions > 0
    assert answers == [[[7, 3, 300] * 8]] * 3


def test_those_of_a_class_get_ready_together(llm: LLM) -> None:
    masks.Together.calls.clear()
    pairs = [(PROMPT, asking(together=40 + n)) for n in range(3)]
    assert tokens(llm, *pairs) == [[[40 + n] * 9] for n in range(3)]
    assert 3 in masks.Together.calls  # and 1, where a row is checked alone


def test_one_for_every_request_until_it_has_done(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), num_gpu_blocks_override=64, debug=True, logits_processors=[f"{HERE}:Even"])
    for pair in PLAIN:
        for answer in tokens(llm, pair)[0]:
            assert all(token % 2 == 0 for token in answer[:3])
    with pytest.raises(RequestError, match=r"beam search is refused.*Even"):
        llm.beam_search([PROMPT], BeamSearchParams(2, 3))


def test_the_order_is_after_biases_and_before_penalties() -> None:
    """A row of zeros: allowed, bias, plug-in, repetition penalty."""

    class Sets(LogitsProcessor):
        arguments = ("sets",)

        def apply(self, logits: Any, output_ids: Any) -> None:
            logits[4] *= 10

    params = SamplingParams(
        allowed_token_ids=[1, 4], logit_bias={4: 1.0}, repetition_penalty=2.0, extra_args={"sets": True}
    )
    chain = build_chain(ProcessorRequest(params, [4], 6), load_plugins([Sets]))
    row = processed(np.zeros(6, np.float32), SamplingState(SamplingInput(params, chain)))
    assert row.tolist() == [-np.inf, 0, -np.inf, -np.inf, 5, -np.inf]


# -- faults ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "fork": "fails: RuntimeError: broken in fork",
    "advance": "fails: RuntimeError: broken in advance",
    "apply": "fails: RuntimeError: broken in apply",
    "half": "fails: RuntimeError: broken in half",
    "nan": "has made a logit NaN or infinite",
    "infinite": "has made a logit NaN or infinite",
    "nothing": "leave no token to sample",
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_fault_ends_its_request_alone(llm: LLM, where: str) -> None:
    good = [(PROMPT, asking(cycle=[9, 8, 7])), *PLAIN]
    expected = tokens(llm, *good)
    failed, *others = tokens(llm, (OTHERS, asking(faulty=where)), *good)
    assert FAULTS[where] in failed and f"{HERE}:Faulty" in failed
    assert others == expected
    llm.llm_engine.check_integrity()


def test_a_row_without_tokens_names_the_processor_first(llm: LLM) -> None:
    (failed,) = tokens(llm, (OTHERS, asking(faulty="nothing")))
    assert failed.startswith(f"the logits processor {HERE}:Faulty, beside ")


def test_a_fault_in_getting_ready_ends_its_request_alone(llm: LLM) -> None:
    failed, good = tokens(llm, (OTHERS, asking(together=-1)), (PROMPT, asking(together=40)))
    assert "Together fails: RuntimeError: not this one" in failed and good == [[40] * 9]


def test_a_class_without_apply_says_so(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), num_gpu_blocks_override=64, logits_processors=[masks.NoApply])
    (failed,) = tokens(llm, (PROMPT, SamplingParams(**GREEDY)))
    assert "NoApply has no apply()" in failed


def test_what_depends_on_more_than_its_sequence_is_found_in_debug_runs(llm: LLM, tiny_path: Path) -> None:
    (failed,) = tokens(llm, (PROMPT, asking(leaky=1)))
    assert "Leaky" in failed and "made anew from the request and its tokens" in failed


@pytest.mark.parametrize(
    ("extra_args", "said"),
    [
        ({"cycle": [7], "colour": 1}, r"no logits processor takes 'colour'; this engine's take .*cycle"),
        ({"cycle": [400]}, r"logits processor .*Cycle: cycle=\[400\] is refused"),
        ({"cycle": []}, r"it is a list of token ids"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(llm: LLM, extra_args: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate([PROMPT], SamplingParams(extra_args=extra_args), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_fault_at_arrival_is_no_fault_of_the_caller(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="Faulty fails: RuntimeError: broken in init"):
        llm.generate([PROMPT], asking(faulty="init"), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_without_any_refuses_arguments(tiny_llm: LLM) -> None:
    with pytest.raises(RequestError, match="no logits processor takes 'cycle'; this engine has none"):
        tiny_llm.generate([PROMPT], asking(cycle=[7]), use_tqdm=False)


# -- names -------------------------------------------------------------------------------------------------------------

NAMES = [
    ("no-such-one", "neither 'module:Class' nor the name of an installed one"),
    (f"{HERE}:", "not of the form 'module:Class'"),
    (f"{HERE}:Missing", "cannot be imported: AttributeError"),
    ("no_such_module:Mask", "cannot be imported: ModuleNotFoundError"),
    (f"{HERE}:Abstract", "not a class derived from quire.LogitsProcessor"),
    (f"{HERE}:PROMPT", "cannot be imported"),
    (masks.Abstract, "'Abstract' is not a class derived from quire.LogitsProcessor"),
]


@pytest.mark.parametrize(("name", "said"), NAMES, ids=lambda value: str(value)[:40])
def test_what_is_no_processor_stops_the_start(name: Any, said: str) -> None:
    with pytest.raises(QuireError, match=re.escape(said)):
        load_plugins([name])


def test_none_is_named_twice() -> None:
    with pytest.raises(QuireError, match="named twice"):
        load_plugins([masks.Cycle, f"{HERE}:Cycle"])


@pytest.mark.parametrize("given", ["a:B", 5, [1], {"a": "b"}])
def test_the_setting_is_a_list_of_names(tiny_path: Path, given: Any) -> None:
    with pytest.raises(RequestError, match=r"logits_processors=.*must be a list"):
        LLM(str(tiny_path), logits_processors=given)


def test_nothing_is_loaded_before_the_names_are_known_to_be_good(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="logits_processors: 'x:Y' cannot be imported"):
        LLM(str(tmp_path / "there is no model here"), logits_processors=["x:Y"])


# -- in another process ------------------------------------------------------------------------------------------------


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence's input comes to the executor as it would in another process."""
    make = SamplingState.__init__

    def from_afar(self: SamplingState, sampling: SamplingInput, output_ids: Any = ()) -> None:
        make(self, pickle.loads(pickle.dumps(sampling)), output_ids)

    monkeypatch.setattr(SamplingState, "__init__", from_afar)


def test_what_was_pickled_gives_the_same_tokens(llm: LLM, request: pytest.FixtureRequest) -> None:
    own = {"logit_bias": {7: 3.0}, "bad_words": ["a b"], "min_tokens": 3, "repetition_penalty": 1.2, "n": 2}
    pairs = [
        *PLAIN,
        (PROMPT, asking(cycle=[9, 8, 7], how="bits")),
        (OTHERS, SamplingParams(**DRAWN, **own, frequency_penalty=0.2, extra_args={"together": 41})),
    ]
    expected = tokens(llm, *pairs)
    request.getfixturevalue("pickled")
    assert tokens(llm, *pairs) == expected


@pytest.mark.usefixtures("pickled")
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("pickle", "cannot be sent to another process"),
        ("unpickle", "cannot be read in another process: RuntimeError: broken in unpickle"),
    ],
)
def test_what_cannot_be_pickled_ends_its_request_alone(llm: LLM, where: str, said: str) -> None:
    failed, good = tokens(llm, (PROMPT, asking(faulty=where)), (OTHERS, asking(cycle=[7])))
    assert f"{HERE}:Faulty" in failed and said in failed
    assert good == [[7] * 9]


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("kind", [np.uint32, np.int32])
def test_bits_are_the_lowest_first(size: int, kind: Any) -> None:
    rng = np.random.default_rng(size)
    wanted = rng.random(size) < 0.5
    words = np.zeros(-(-size // 32), np.uint32)
    for token in np.flatnonzero(wanted):
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)

    class Fixed(TokenMask):
        def allowed(self, output_ids: Any) -> Any:
            return BitMask(words.view(kind))

    row = rng.standard_normal(size).astype(np.float32)
    changed = row.copy()
    Fixed(ProcessorRequest(SamplingParams(), [1], size)).apply(changed, [])
    assert changed.tolist() == np.where(wanted, row, -np.inf).tolist()


@pytest.mark.parametrize(
    "given",
    [BitMask(np.zeros(1, np.uint32)), BitMask(np.zeros(2, np.uint8)), np.ones(5, bool), [50], ["a"], [1.5], [-1]],
)
def test_a_mask_of_another_size_is_an_error(given: Any) -> None:
    class Wrong(TokenMask):
        def allowed(self, output_ids: Any) -> Any:
            return given

    with pytest.raises((ValueError, IndexError)):
        Wrong(ProcessorRequest(SamplingParams(), [1], 40)).apply(np.zeros(40, np.float32), [])


def test_requests_may_be_copied_and_keep_what_they_were_given() -> None:
    given = {"cycle": [7]}
    params = SamplingParams(extra_args=given)
    given["more"] = 1
    assert params.extra_args == {"cycle": [7]} and SamplingParams(extra_args={}).extra_args is None
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    request = ProcessorRequest(params, [1], 5)
    request.extra_args["mine"] = 2
    assert request.extra_args == {"cycle": [7]}
