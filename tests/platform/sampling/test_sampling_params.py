"""Sampling parameters: vLLM's names and defaults, and no impossible value gets through."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BeamSearchParams, RequestError, SamplingParams
from quire.platform.sampling import params as module
from quire.platform.sampling.params import RequestOutputKind

DEFAULTS = {
    "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": None, "stop": (), "stop_token_ids": (),
    "bad_words": (), "include_stop_str_in_output": False, "ignore_eos": False, "max_tokens": 16,
    "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True, "skip_special_tokens":
    True, "spaces_between_special_tokens": True, "logit_bias": None, "allowed_token_ids": None,
    "output_kind": RequestOutputKind.CUMULATIVE, "extra_args": None,
    "structured_outputs": None, "thinking_token_budget": None,
    "reasoning": None,
}  # fmt: skip

REFUSED = [
    ("n", [0, -1, module.MAX_N + 1, 10**400, 1.0, True, "2", None]),
    ("temperature", [-0.1, math.nan, math.inf, 10**400, "1", None, True]),
    ("top_p", [0, -0.5, 1.0001, math.nan, "0.5", None]),
    ("top_k", [-2, 1.5, True, "5", None, 2**40]),
    ("min_p", [-0.1, 1.1, math.nan, math.inf, None]),
    ("presence_penalty", [-2.1, 2.1, math.nan, "0"]),
    ("frequency_penalty", [-2.1, 2.1, -math.inf, None]),
    ("repetition_penalty", [0, -1, math.nan, math.inf, 1e30]),
    ("seed", [1.5, "7", True, 2**64, -(2**63) - 1]),
    (
        "stop",
        [[""], "", ["a", ""], [1], 5, b"a", {"a": 1}, ["x"] * (module.MAX_STOP_STRINGS + 1), ["x" * 5000]],
    ),
    ("stop_token_ids", [[-1], [1.0], [True], ["1"], 5, "12", list(range(5000)), itertools.count()]),
    ("bad_words", [[""], [None], "word", ["x"] * 5000, itertools.repeat("a")]),
    ("max_tokens", [0, -1, 1.5, True, "16", 2**40]),
    ("min_tokens", [-1, 1.5, 17, None]),
    ("logprobs", [-2, 1.5, True, "5"]),
    ("prompt_logprobs", [-2, 0.0, False]),
    ("logit_bias", [[1], {"x": 1}, {-1: 1}, {1: math.nan}, {1: "1"}, {1: None}, {1.5: 1}, {"1" * 5000: 1}]),
    ("allowed_token_ids", [[], [-1], ["a"], 3]),
    ("detokenize", [1, None, "yes"]),
    ("ignore_eos", [0, None]),
    ("skip_special_tokens", [None]),
    ("spaces_between_special_tokens", [2]),
    ("include_stop_str_in_output", ["no"]),
    ("output_kind", [0, "DELTA", None]),
    ("structured_outputs", [{"json": {}}, "json", 5]),
    ("thinking_token_budget", [-1, 1.5, True, "5"]),
    ("reasoning", [("<think>", "</think>"), "<think>", True]),
    ("extra_args", [["a"], "a", 5, {1: 2}, {"": 1}, {None: 1}, {str(n): n for n in range(module.MAX_EXTRA_ARGS + 1)}]),
]


def test_names_and_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} == DEFAULTS


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in REFUSED for v in values], ids=lambda v: str(v)[:30]
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert field in str(refused.value)
    assert len(str(refused.value)) < 300


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=3)  # type: ignore[call-arg]


def test_none_and_lists_become_tuples_and_do_not_alias() -> None:
    stop, bias = ["a", "b"], {1: 2.0}
    params = SamplingParams(
        stop=stop, logit_bias=bias, stop_token_ids=None, bad_words=None, allowed_token_ids=iter([3, 4])
    )
    stop.append("c")
    bias[5] = 1.0
    assert params.stop == ("a", "b")
    assert params.logit_bias == {1: 2.0}
    assert (params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ((), (), (3, 4))
    assert SamplingParams(stop="end").stop == ("end",)


def test_a_bias_past_every_float_is_limited() -> None:
    bias = {4: 10**400, 5: -(10**400), 6: math.inf}
    assert SamplingParams(logit_bias=bias).logit_bias == {4: 100.0, 5: -100.0, 6: 100.0}


def test_is_immutable_and_copies() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 1.0}, seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3


def test_tiny_temperature_is_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="raised to 0.01"):
        assert SamplingParams(temperature=1e-4).temperature == 0.01
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.01).temperature == 0.01


def test_that_warning_has_one_text() -> None:
    """Python keeps each text that was warned of, for good: clients choose the number."""
    with pytest.warns(UserWarning) as warned:
        for temperature in (1e-3, 1e-4, 1.2345e-5):
            SamplingParams(temperature=temperature)
    assert len({str(one.message) for one in warned}) == 1


def test_meanings_taken_from_vllm() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logit_bias={"7": 1000, 8: -1e300, 9: math.inf}).logit_bias == {
        7: 100.0,
        8: -100.0,
        9: 100.0,
    }
    assert SamplingParams(max_tokens=None, min_tokens=500).max_tokens is None


@pytest.mark.parametrize(
    ("together", "named"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "max_tokens"),
        ({"stop": "a", "detokenize": False}, "detokenize"),
    ],
)
def test_contradictions_are_refused(together: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        SamplingParams(**together)


def test_validate_for_a_vocabulary() -> None:
    SamplingParams(
        stop_token_ids=[99], allowed_token_ids=[0], logit_bias={99: 1}, logprobs=20, prompt_logprobs=0
    ).validate_for(100)
    for bad in ({"stop_token_ids": [1, 100]}, {"allowed_token_ids": [100]}, {"logit_bias": {100: 1}}):
        with pytest.raises(RequestError, match=f"{next(iter(bad))}=100"):
            SamplingParams(**bad).validate_for(100)
    for field in ("logprobs", "prompt_logprobs"):
        for asked in (21, -1):
            with pytest.raises(RequestError, match="max_logprobs"):
                SamplingParams(**{field: asked}).validate_for(100)
        SamplingParams(**{field: -1}).validate_for(100, max_logprobs=-1)
        SamplingParams(**{field: 21}).validate_for(100, max_logprobs=21)


def test_beam_search_params() -> None:
    params = BeamSearchParams(4, 10)
    assert (params.ignore_eos, params.temperature, params.length_penalty) == (False, 0.0, 1.0)
    assert params.include_stop_str_in_output is False
    for bad in ({"beam_width": 0}, {"beam_width": 10**6}, {"max_tokens": 0}, {"length_penalty": math.nan}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **bad})


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab1 ", max_size=5), st.binary(max_size=5),
    st.lists(st.one_of(st.integers(), st.text("ab1", max_size=3), st.none()), max_size=4),
    st.dictionaries(st.integers(), st.floats(), max_size=3), st.just(object()), st.complex_numbers(),
)  # fmt: skip


FIELDS = st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)])


@pytest.mark.filterwarnings("ignore:temperature")
@given(st.dictionaries(FIELDS, ANYTHING, max_size=4))
def test_anything_is_either_valid_or_a_request_error(given_values: dict[str, object]) -> None:
    try:
        params = SamplingParams(**given_values)
    except RequestError:
        return
    assert 1 <= params.n <= module.MAX_N and 0 <= params.temperature < math.inf and 0 < params.top_p <= 1
    assert dataclasses.replace(params) == params
