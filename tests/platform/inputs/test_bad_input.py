"""Whatever a caller gets wrong is a ValueError that names it, and the same LLM answers the next request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from tests.platform.conftest import make_llama

GOOD = [5, 6, 7]


@pytest.fixture(autouse=True)
def still_answers(tiny_llm):
    expected = tiny_llm.generate(GOOD, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    yield
    assert not tiny_llm.llm_engine.has_unfinished_requests()
    tiny_llm.llm_engine.check_integrity()
    assert tiny_llm.llm_engine.pool.num_owned == 0
    after = tiny_llm.generate(GOOD, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert after[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


PROMPTS = {
    "empty list of ids": ([[]], "empty"),
    "empty ids in a dict": ({"prompt_token_ids": []}, "empty"),
    "empty text": ("", "empty"),
    "token id too high": ([5, 384], r"token 1 is 384; .* 0 to 383"),
    "token id negative": ([5, -1], "token 1 is -1"),
    "token id a float": ([[5, 1.5]], "token 1 is 1.5"),
    "token id a bool": ([[5, True]], "token 1 is True"),
    "over the model's length": (list(range(3, 259)), "context length is 256 tokens. .* in 256 tokens, and an answer"),
    "neither text nor ids": (3, "must be a text"),
    "bytes": ([b"hello"], "not bytes"),
    "dict without prompt": ({"text": "a"}, "takes 'prompt'"),
    "dict with an unknown key": ({"prompt": "a", "encoder_prompt": "b"}, "encoder_prompt"),
    "an image for a model without eyes": ({"prompt": "a", "multi_modal_data": {"image": b""}}, "takes text only"),
    "empty salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(tiny_llm, name):
    prompt, message = PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        tiny_llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(tiny_llm):
    with pytest.raises(ValueError, match="token 0 is 999"):
        tiny_llm.generate([GOOD, GOOD, [999]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_over_the_pool(tiny_path):
    llm = LLM(str(tiny_path), num_gpu_blocks_override=4, block_size=8)
    with pytest.raises(ValueError, match=r"20 prompt tokens and 30 output tokens .* KV pool of 32 tokens"):
        llm.generate([3] * 20, SamplingParams(max_tokens=30), use_tqdm=False)
    with pytest.raises(ValueError, match="KV pool of 32 tokens"):
        llm.generate([3] * 40, SamplingParams(max_tokens=None), use_tqdm=False)
    output = llm.generate([3] * 20, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 13 and output.outputs[0].finish_reason == "length"
    output = llm.generate([3] * 20, SamplingParams(max_tokens=13, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 13


def test_max_model_len_ends_an_answer(tiny_path):
    llm = LLM(str(tiny_path), max_model_len=24)
    output = llm.generate([3] * 20, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match="maximum context length is 24 tokens"):
        llm.generate([3] * 24, SamplingParams(max_tokens=1), use_tqdm=False)


MODEL_DEPENDENT = {
    "allowed_token_ids": ({"allowed_token_ids": [400]}, "allowed_token_ids"),
    "logit_bias": ({"logit_bias": {400: 1.0}}, "logit_bias"),
    "stop_token_ids": ({"stop_token_ids": [400]}, "stop_token_ids"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "prompt_logprobs": ({"prompt_logprobs": 21}, "prompt_logprobs"),
}


@pytest.mark.parametrize("name", MODEL_DEPENDENT)
def test_parameters_that_do_not_fit_the_model(tiny_llm, name):
    settings, message = MODEL_DEPENDENT[name]
    with pytest.raises(ValueError, match=message):
        tiny_llm.generate(GOOD, SamplingParams(**settings), use_tqdm=False)


def test_parameters_of_the_wrong_kind_or_number(tiny_llm):
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        tiny_llm.generate([GOOD, GOOD], [SamplingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match="must be SamplingParams"):
        tiny_llm.generate(GOOD, {"temperature": 0}, use_tqdm=False)


def test_a_tokenizer_of_another_model(tmp_path):
    make_llama(tmp_path, vocab_size=100)
    llm = LLM(str(tmp_path))
    with pytest.raises(ValueError, match="ends at 99: tokenizer and model do not belong together"):
        llm.generate("Once upon a time", use_tqdm=False)


def test_chat_without_messages(tiny_llm):
    with pytest.raises(ValueError, match="messages"):
        tiny_llm.chat([], use_tqdm=False)


def test_chat_without_template(tiny_llm):
    with pytest.raises(ValueError, match="chat template"):
        tiny_llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)


def test_beam_prompts_are_checked_too(tiny_llm):
    with pytest.raises(ValueError, match="token 0 is 999"):
        tiny_llm.beam_search([[999]], BeamSearchParams(beam_width=2, max_tokens=2))


ENGINE = {
    "blocks beyond memory": ({"num_gpu_blocks_override": 10**12}, "are available"),
    "bytes beyond memory": ({"kv_cache_memory_bytes": 10**16}, "are available"),
    "huge blocks": ({"block_size": 10**12}, "not one block"),
    "fraction as text": ({"gpu_memory_utilization": "0.5"}, "memory_fraction='0.5'"),
    "flag as text": ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no'"),
    "seed as text": ({"seed": "x"}, "seed='x'"),
    "revision as a number": ({"revision": 5}, "revision=5"),
    "revision of a directory": ({"revision": "v1"}, "has no revision 'v1'"),
    "tokenizer revision of a directory": ({"tokenizer_revision": "v1"}, "has no revision 'v1'"),
    "max_logprobs": ({"max_logprobs": -7}, "max_logprobs=-7"),
    "code in an override": ({"hf_overrides": {"auto_map": {"AutoModel": "a.B"}}}, "none is ever run"),
    "a function as override": ({"hf_overrides": lambda config: config}, "no code is taken"),
    "an override that the model has not": ({"hf_overrides": {"rope_thetaa": 1.0}}, "has no 'rope_thetaa'"),
    "an override that is no JSON": ({"hf_overrides": {"rope_theta": object()}}, "must be JSON values"),
    "the hub's folder as a number": ({"download_dir": 5}, "download_dir=5"),
    "the hub's token as a number": ({"hf_token": 5}, "hf_token"),
    "sampling's folder": ({"generation_config": "/nowhere"}, "generation_config='/nowhere'"),
    "a template that is not there": ({"chat_template": "/nowhere.jinja"}, "cannot be read"),
    "two hosts": ({"data_parallel_size": 2}, "data_parallel_size=2: one process computes"),
    "smells": ({"limit_mm_per_prompt": {"image": 1, "smell": 1}}, "must be {'image': a number}, or 'video' or"),
    "model length": ({"max_model_len": 10_000}, "positions for 256"),
    "no block": ({"kv_cache_memory_bytes": 10}, "not one block"),
    "block size": ({"block_size": 0}, "block_size=0"),
    "budget": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
    "dtype": ({"dtype": "int8"}, "int8"),
    "fraction": ({"gpu_memory_utilization": 1.5}, "memory_fraction=1.5"),
}


@pytest.mark.parametrize("name", ENGINE)
def test_engine_settings(tiny_path, name):
    settings, message = ENGINE[name]
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_path), **settings)


def test_an_unknown_setting_is_not_ignored(tiny_path):
    with pytest.raises(TypeError, match="unknown argument: max_model_length; did you mean max_model_len"):
        LLM(str(tiny_path), max_model_length=2)


def test_beam_search_draws_nothing():
    with pytest.raises(ValueError, match="temperature"):
        BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.7)


@pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=2)])
def test_beam_search_takes_its_own_parameters(tiny_llm, params):
    with pytest.raises(ValueError, match="must be BeamSearchParams"):
        tiny_llm.beam_search([GOOD], params)


def test_messages_that_are_no_list(tiny_llm):
    with pytest.raises(ValueError, match="messages must be a list"):
        tiny_llm.chat(iter([{"role": "user", "content": "a"}]), chat_template="x", use_tqdm=False)


def test_engine_arguments_of_the_wrong_type(tiny_llm):
    with pytest.raises(ValueError, match="must be a string"):
        tiny_llm.llm_engine.add_request([1], GOOD)
    with pytest.raises(ValueError, match="must be SamplingParams"):
        tiny_llm.llm_engine.add_request("q", GOOD, {})


@pytest.mark.parametrize(("name", "value"), [("QUIRE_ISA", "foo"), ("QUIRE_KERNELS", "foo")])
def test_wrong_environment_values_fail_at_start(tiny_path, name, value):
    script = (
        f"from quire import LLM\ntry: LLM({str(tiny_path)!r})\nexcept ValueError as error: print('refused:', error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, name: value}, capture_output=True, text=True
    )
    assert result.stdout.startswith("refused:") and name in result.stdout and value in result.stdout, result.stderr
