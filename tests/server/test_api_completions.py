"""POST /v1/completions, with OpenAI's client where that can say it: the same tokens and logprobs as LLM.generate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from quire import LLM, BeamSearchParams
from quire.platform.outputs.outputs import CompletionOutput, Logprob
from quire.server.responses.logprobs import CompletionLogprobs
from tests.server.api_answers import events, joined, offline, post, refusal, strict
from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

PATH = "/v1/completions"
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "One day, a red circle", "The blue star"]
LONG = "Once upon a time a red circle met a blue star. " * 4
MODEL = "quire-demo"
EOS = 2  # <|end|>
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 24}


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text)["input_ids"])


def mean_logprob(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / len(output.token_ids)


# -- prompts -----------------------------------------------------------------------------------------------------


def test_a_text_is_continued(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    want = offline(llm, PROMPT, **GREEDY).outputs[0]
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", MODEL, 1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (want.text, "length")
    assert answer.id.startswith("cmpl-")


def test_the_model_may_be_left_out(http: Any, llm: LLM) -> None:
    answer = post(http, PATH, prompt=PROMPT, **GREEDY)
    assert answer["model"] == MODEL
    assert answer["choices"][0]["text"] == offline(llm, PROMPT, **GREEDY).outputs[0].text


def test_texts_are_continued_each_on_its_own(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPTS, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [offline(llm, p, **GREEDY).outputs[0].text for p in PROMPTS]


def test_token_ids_are_continued(client: OpenAI, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)
    answer = client.completions.create(model=MODEL, prompt=ids, **GREEDY)
    assert answer.choices[0].text == offline(llm, PROMPT, **GREEDY).outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_lists_of_token_ids_are_continued_each_on_its_own(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=[ids_of(llm, p) for p in PROMPTS], **GREEDY)
    assert [choice.text for choice in answer.choices] == [offline(llm, p, **GREEDY).outputs[0].text for p in PROMPTS]


@pytest.mark.parametrize("model", ["french", "shout"])
def test_an_adapter_by_its_name(client: OpenAI, llm: LLM, model: str) -> None:
    prompt = "<|user|>Who are you?<|end|><|assistant|>"
    answer = client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert answer.model == model
    assert answer.choices[0].text == offline(llm, prompt, model, **GREEDY).outputs[0].text
    assert answer.choices[0].text != offline(llm, prompt, **GREEDY).outputs[0].text


@pytest.mark.parametrize("prompt", [[], [[]], None])
def test_an_empty_prompt_is_refused(http: Any, prompt: Any) -> None:
    assert "empty" in refusal(http, PATH, prompt=prompt)["message"]


def test_an_empty_text_is_what_the_tokenizer_puts_around_it(http: Any) -> None:
    for prompt in ("", [""]):
        assert post(http, PATH, prompt=prompt, return_token_ids=True)["choices"][0]["prompt_token_ids"] == [1]


@pytest.mark.parametrize("prompt", [[10**6], [-1], [PROMPT, [5]], [1.5], {"text": "x"}, 7])
def test_what_is_no_prompt_is_refused(http: Any, prompt: Any) -> None:
    assert "prompt" in refusal(http, PATH, prompt=prompt)["message"]


def test_a_prompt_that_cannot_fit_is_refused(http: Any) -> None:
    assert "2048" in refusal(http, PATH, prompt="a star " * 3000)["message"]
    assert "2048" in refusal(http, PATH, prompt="a" * 10**6)["message"]


def test_too_many_prompts_are_refused(http: Any) -> None:
    assert refusal(http, PATH, prompt=["a"] * 257)["param"] == "prompt"


def test_add_special_tokens(http: Any, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)
    for add, want in ((True, ids), (False, ids[1:])):
        answer = post(http, PATH, prompt=PROMPT, add_special_tokens=add, return_token_ids=True, **GREEDY)
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == want
        expected = offline(llm, {"prompt_token_ids": want}, **GREEDY).outputs[0]
        assert choice["token_ids"] == list(expected.token_ids)
    assert post(http, PATH, prompt=ids, add_special_tokens=True, **GREEDY)["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("most", [1, 3, 2048, -1])
def test_truncate_prompt_tokens_keeps_the_last(http: Any, llm: LLM, most: int) -> None:
    ids = ids_of(llm, LONG)
    want = ids[-most:] if most > 0 else ids
    answer = post(http, PATH, prompt=LONG, truncate_prompt_tokens=most, return_token_ids=True, **GREEDY)
    assert answer["choices"][0]["prompt_token_ids"] == want
    assert answer["choices"][0]["token_ids"] == list(
        offline(llm, {"prompt_token_ids": want}, **GREEDY).outputs[0].token_ids
    )


def test_truncate_prompt_tokens_makes_room_for_the_answer(http: Any) -> None:
    ids = [5 + number % 500 for number in range(3000)]
    answer = post(http, PATH, prompt=ids, truncate_prompt_tokens=-1, max_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-2045:]


# -- echo ----------------------------------------------------------------------------------------------------------


def test_echo_repeats_the_prompt(http: Any, llm: LLM) -> None:
    text = offline(llm, PROMPT, **GREEDY).outputs[0].text
    answer = post(http, PATH, prompt=PROMPT, echo=True, **GREEDY)
    assert answer["choices"][0]["text"] == PROMPT + text
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 24


def test_echo_decodes_a_prompt_of_token_ids(http: Any, llm: LLM) -> None:
    ids = ids_of(llm, PROMPT)[1:]
    answer = post(http, PATH, prompt=ids, echo=True, **GREEDY)
    assert answer["choices"][0]["text"].startswith(PROMPT)


def test_echo_with_logprobs_has_the_prompts(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, logprobs=2, prompt_logprobs=2, **GREEDY)
    (choice,) = post(http, PATH, prompt=PROMPT, echo=True, logprobs=2, **GREEDY)["choices"]
    shown = choice["logprobs"]
    assert len({len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    ids = [*want.prompt_token_ids, *want.outputs[0].token_ids]
    assert shown["tokens"] == [llm.get_tokenizer().decode([token]) for token in ids]
    entries = [*(want.prompt_logprobs or [])[1:], *(want.outputs[0].logprobs or [])]
    assert shown["token_logprobs"] == [None, *(e[token].logprob for token, e in zip(ids[1:], entries, strict=True))]
    assert shown["top_logprobs"][0] is None and all(2 <= len(top) <= 3 for top in shown["top_logprobs"][1:])
    # The text begins behind BOS, which it does not show.
    for token, offset in list(zip(shown["tokens"], shown["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_the_prompt(http: Any, llm: LLM, stream: bool) -> None:
    want = offline(llm, PROMPT, prompt_logprobs=1, max_tokens=1)
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    if stream:
        *chunks, last = events(http, PATH, stream_options={"include_usage": True}, **body)
        (choice,), usage = [c["choices"][0] for c in chunks], last["usage"]
    else:
        answer = post(http, PATH, **body)
        (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    scores = [e[token].logprob for token, e in zip(want.prompt_token_ids[1:], want.prompt_logprobs[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == [None, *scores]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(want.prompt_token_ids), 0)


def test_nothing_to_generate_and_nothing_to_echo_is_refused(http: Any) -> None:
    assert refusal(http, PATH, prompt=PROMPT, max_tokens=0)["param"] == "max_tokens"


# -- several answers ---------------------------------------------------------------------------------------------


def test_n_answers_to_each_prompt(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPTS[:2], n=3, **DRAWN)
    want = [out.text for prompt in PROMPTS[:2] for out in offline(llm, prompt, n=3, **DRAWN).outputs]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(want)) > 3


def test_best_of_answers_those_of_the_best_mean_logprob(client: OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=6, **DRAWN)
    drawn = offline(llm, PROMPT, n=6, logprobs=0, **DRAWN).outputs
    best = sorted(drawn, key=mean_logprob, reverse=True)[:2]
    assert [choice.text for choice in answer.choices] == [out.text for out in best]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(out.token_ids) for out in drawn)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True, "x": True}, "stream": True}, "stream_options"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "n": 200, "max_tokens": 1}, "n"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_an_impossible_value_names_its_field(http: Any, fields: dict[str, Any], param: str, as_list: bool) -> None:
    error = refusal(http, PATH, prompt=PROMPTS if as_list else PROMPT, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_the_client_raises_its_own_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert (caught.value.param, caught.value.status_code) == ("temperature", 400)


# -- logprobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 3])
def test_logprobs_are_the_engines(client: OpenAI, llm: LLM, most: int) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=most, **DRAWN)
    shown, want = answer.choices[0].logprobs, offline(llm, PROMPT, logprobs=most, **DRAWN).outputs[0]
    assert shown is not None and want.logprobs is not None
    chosen = [entries[token] for token, entries in zip(want.token_ids, want.logprobs, strict=True)]
    assert shown.tokens == [one.decoded_token for one in chosen]
    assert shown.token_logprobs == [one.logprob for one in chosen]
    assert "".join(shown.tokens) == answer.choices[0].text
    assert shown.text_offset == [sum(map(len, shown.tokens[:place])) for place in range(len(shown.tokens))]
    # The likeliest, and the one that was drawn.
    for top, entries, one in zip(shown.top_logprobs, want.logprobs, chosen, strict=True):
        assert top == {e.decoded_token: e.logprob for e in entries.values()}
        assert one.decoded_token in top and most <= len(top) <= most + 1


def test_return_tokens_as_token_ids(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, logprobs=1, **GREEDY).outputs[0].token_ids
    (choice,) = post(http, PATH, prompt=PROMPT, logprobs=1, return_tokens_as_token_ids=True, **GREEDY)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in want]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[f"token_id:{token}"] for token in want]


def test_prompt_logprobs_have_vllms_form(http: Any, llm: LLM) -> None:
    want = offline(llm, PROMPT, prompt_logprobs=1, **GREEDY).prompt_logprobs
    (choice,) = post(http, PATH, prompt=PROMPT, prompt_logprobs=1, **GREEDY)["choices"]
    assert want is not None and choice["prompt_logprobs"] == [
        entries
        and {
            str(token): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in entries.items()
        }
        for entries in want
    ]
    assert choice["logprobs"] is None


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, {**DRAWN, "n": 3}, {**GREEDY, "n": 3}, {**GREEDY, "max_tokens": 200}]
)
def test_a_stream_makes_the_same_texts_and_tokens(http: Any, llm: LLM, params: dict[str, Any]) -> None:
    whole = post(http, PATH, prompt=PROMPTS, return_token_ids=True, **params)["choices"]
    parts = joined(events(http, PATH, prompt=PROMPTS, return_token_ids=True, **params))
    want = [out for prompt in PROMPTS for out in offline(llm, prompt, **params).outputs]
    assert sorted(parts) == list(range(len(want))) == [choice["index"] for choice in whole]
    for index, out in enumerate(want):
        assert parts[index]["text"] == whole[index]["text"] == out.text
        assert parts[index]["tokens"] == whole[index]["token_ids"] == list(out.token_ids)
        assert parts[index]["finish_reason"] == whole[index]["finish_reason"] == out.finish_reason


def test_a_stream_through_the_client(client: OpenAI, llm: LLM) -> None:
    text = ""
    for chunk in client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **GREEDY):
        assert len(chunk.choices) == 1
        text += chunk.choices[0].text
    assert text == offline(llm, PROMPT, **GREEDY).outputs[0].text


def test_a_streams_logprobs_are_the_whole_answers(http: Any) -> None:
    body = {"prompt": PROMPTS[:2], "echo": True, "logprobs": 2, **DRAWN}
    whole = post(http, PATH, **body)["choices"]
    chunks = [choice for chunk in events(http, PATH, **body) for choice in chunk["choices"]]
    for choice in whole:
        mine = [c["logprobs"] for c in chunks if c["index"] == choice["index"] and c["logprobs"]]
        assert len(mine) > 5
        for name, values in choice["logprobs"].items():
            assert [item for part in mine for item in part[name]] == values


def test_include_usage_comes_last_and_alone(http: Any) -> None:
    *chunks, last = events(http, PATH, prompt=PROMPTS, stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    usage = post(http, PATH, prompt=PROMPTS, **GREEDY)["usage"]
    assert {k: v for k, v in last["usage"].items() if k.endswith("_tokens")} == {
        k: v for k, v in usage.items() if k.endswith("_tokens")
    }


def test_continuous_usage_counts_up(http: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(http, PATH, prompt=PROMPT, stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts)) and counts[0] == 1 and counts[-1] == 24
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + n for c, n in zip(chunks, counts, strict=True)
    )
    assert last["usage"] == chunks[-1]["usage"]


def test_without_stream_options_there_is_no_usage(http: Any) -> None:
    assert all("usage" not in chunk for chunk in events(http, PATH, prompt=PROMPT, **GREEDY))


def test_bodies_are_what_the_openai_package_says(http: Any) -> None:
    answer = strict(Completion, post(http, PATH, prompt=PROMPTS, logprobs=2, n=2, **DRAWN))
    assert answer.created > 1_600_000_000
    for chunk in events(http, PATH, prompt=PROMPT, logprobs=2, stream_options={"include_usage": True}, **DRAWN):
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        for choice in chunk["choices"]:  # null until the last, which the package's type does not know
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strict(Completion, chunk)


# -- when it ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [" triangle", ["zebra", "gle na"], "e"])
def test_stop_strings(http: Any, llm: LLM, stop: Any, keep: bool) -> None:
    params = {**GREEDY, "stop": stop, "include_stop_str_in_output": keep}
    want = offline(llm, PROMPT, **params).outputs[0]
    (choice,) = post(http, PATH, prompt=PROMPT, **params)["choices"]
    streamed = joined(events(http, PATH, prompt=PROMPT, **params))[0]
    assert choice["text"] == streamed["text"] == want.text
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    assert choice["stop_reason"] == streamed["stop_reason"] == want.stop_reason
    assert choice["text"].endswith(str(want.stop_reason)) == keep


def test_stop_token_ids(http: Any, llm: LLM) -> None:
    tokens = offline(llm, PROMPT, **GREEDY).outputs[0].token_ids
    (choice,) = post(http, PATH, prompt=PROMPT, stop_token_ids=[tokens[4]], return_token_ids=True, **GREEDY)["choices"]
    assert choice["token_ids"] == list(tokens[:5])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[4])


def test_the_models_end_token_ends_it(http: Any, llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 400}
    want = offline(llm, PROMPT, **params).outputs[0]
    answer = post(http, PATH, prompt=PROMPT, **params)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want.text, "stop", None)
    assert want.token_ids[-1] == EOS and answer["usage"]["completion_tokens"] == len(want.token_ids) < 400


def test_ignore_eos_goes_past_it(http: Any, llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
    answer = post(http, PATH, prompt=PROMPT, return_token_ids=True, **params)
    assert answer["choices"][0]["token_ids"] == list(offline(llm, PROMPT, **params).outputs[0].token_ids)
    assert EOS in answer["choices"][0]["token_ids"][:-1] and answer["usage"]["completion_tokens"] == 150


def test_min_tokens_holds_the_end_back(http: Any) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logit_bias": {str(EOS): 100}}
    assert post(http, PATH, **body)["usage"]["completion_tokens"] == 1
    assert post(http, PATH, min_tokens=7, **body)["usage"]["completion_tokens"] == 8


def test_max_tokens_is_sixteen_by_default(http: Any) -> None:
    assert post(http, PATH, prompt=PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16


# -- which tokens -------------------------------------------------------------------------------------------------


def test_a_seed_repeats_the_draws(client: OpenAI, llm: LLM) -> None:
    texts = [client.completions.create(model=MODEL, prompt=PROMPT, **DRAWN).choices[0].text for _ in range(2)]
    other = client.completions.create(model=MODEL, prompt=PROMPT, **{**DRAWN, "seed": 12}).choices[0].text
    assert texts == [offline(llm, PROMPT, **DRAWN).outputs[0].text] * 2
    assert other != texts[0]


def test_without_a_seed_draws_differ(client: OpenAI) -> None:
    drawn = {"temperature": 1.0, "max_tokens": 24}
    assert len({client.completions.create(model=MODEL, prompt=PROMPT, **drawn).choices[0].text for _ in range(4)}) > 1


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"min_p": 0.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"temperature": 1.7},
        {"top_p": 0.4},
        {"skip_special_tokens": False, "temperature": 0, "max_tokens": 100},
        {"spaces_between_special_tokens": False},
        {"bad_words": [" triangle", " green"]},
    ],
)
def test_parameters_reach_the_sampler(http: Any, llm: LLM, params: dict[str, Any]) -> None:
    asked = {**DRAWN, **params}
    (choice,) = post(http, PATH, prompt=PROMPT, return_token_ids=True, **asked)["choices"]
    want = offline(llm, PROMPT, **asked).outputs[0]
    assert (choice["text"], choice["token_ids"]) == (want.text, list(want.token_ids))


def test_logit_bias_decides(http: Any, llm: LLM) -> None:
    (token,) = ids_of(llm, " star")[1:]
    body = {"logit_bias": {str(token): 100}, "temperature": 0, "max_tokens": 3, "return_token_ids": True}
    assert post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"] == [token] * 3
    likeliest = offline(llm, PROMPT, **GREEDY).outputs[0].token_ids[0]
    body["logit_bias"] = {str(likeliest): -100}
    assert post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"][0] != likeliest


def test_allowed_token_ids(http: Any) -> None:
    allowed = [300, 301, 302]
    body = {"allowed_token_ids": allowed, "max_tokens": 20, "seed": 1, "return_token_ids": True}
    tokens = post(http, PATH, prompt=PROMPT, **body)["choices"][0]["token_ids"]
    assert len(tokens) == 20 and set(tokens) <= set(allowed)


def test_bad_words_do_not_come(http: Any) -> None:
    plain = post(http, PATH, prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    text = post(http, PATH, prompt=PROMPT, bad_words=[" triangle", " green"], **GREEDY)["choices"][0]["text"]
    assert " triangle" in plain and " green" in plain
    assert " triangle" not in text and " green" not in text


@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_beam_search(http: Any, llm: LLM, width: int) -> None:
    for length_penalty in (1.0, 0.0):
        params = BeamSearchParams(width, 12, length_penalty=length_penalty)
        beams = [llm.beam_search([prompt], params)[0] for prompt in PROMPTS]
        fields = {"use_beam_search": True, "n": width, "max_tokens": 12, "length_penalty": length_penalty}
        answer = post(http, PATH, prompt=PROMPTS, return_token_ids=True, **fields)
        want = [(beams[p].sequences[b], len(ids_of(llm, PROMPTS[p]))) for p in range(3) for b in range(width)]
        assert [c["token_ids"] for c in answer["choices"]] == [s.tokens[begin:] for s, begin in want]
        assert [c["index"] for c in answer["choices"]] == list(range(3 * width))
        decode = llm.get_tokenizer().decode
        texts = [decode(s.tokens[begin:], skip_special_tokens=True) for s, begin in want]
        assert [c["text"] for c in answer["choices"]] == texts
        assert answer["usage"]["completion_tokens"] == sum(len(s.tokens) - begin for s, begin in want)
        strict(Completion, answer)


# -- usage, ids and caches -------------------------------------------------------------------------------------


def test_usage_counts_prompts_once_and_every_answer(http: Any, llm: LLM) -> None:
    usage = post(http, PATH, prompt=PROMPTS, n=2, ignore_eos=True, **DRAWN)["usage"]
    prompt = sum(len(ids_of(llm, one)) for one in PROMPTS)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 6 * 24)
    assert usage["total_tokens"] == prompt + 6 * 24


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_whole_blocks_of_one_salt(http: Any, llm: LLM, stream: bool) -> None:
    """A block is 8 tokens; the last token of a prompt is always computed."""

    def cached(salt: str) -> int:
        body = {"prompt": LONG, "cache_salt": f"{salt}-{stream}", "max_tokens": 1}
        if stream:
            usage = events(http, PATH, stream_options={"include_usage": True}, **body)[-1]["usage"]
        else:
            usage = post(http, PATH, **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [
        0,
        (len(ids_of(llm, LONG)) - 1) // 8 * 8,
    ] * 2


def test_a_request_id_ends_the_answers_id(http: Any) -> None:
    assert post(http, PATH, prompt=PROMPT, request_id="mine", **GREEDY)["id"] == "cmpl-mine"
    assert {chunk["id"] for chunk in events(http, PATH, prompt=PROMPT, request_id="mine", **GREEDY)} == {"cmpl-mine"}
    response = http.post(PATH, json={"prompt": PROMPT, **GREEDY}, headers={"X-Request-Id": "from-a-proxy"})
    assert response.json()["id"] == "cmpl-from-a-proxy"
    assert len({post(http, PATH, prompt=PROMPT, max_tokens=1)["id"] for _ in range(3)}) == 3


def test_one_id_may_be_used_by_several_at_once(demo: ServerProcess, llm: LLM) -> None:
    async def ask() -> list[str]:
        async with demo.async_client() as client:
            body = {"model": MODEL, "extra_body": {"request_id": "same"}, **GREEDY}
            answers = await asyncio.gather(*(client.completions.create(prompt=p, **body) for p in PROMPTS * 2))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [offline(llm, prompt, **GREEDY).outputs[0].text for prompt in PROMPTS] * 2


def test_many_at_once_get_what_each_gets_alone(demo: ServerProcess, llm: LLM) -> None:
    async def ask(client: Any, seed: int) -> str:
        body = {**DRAWN, "seed": seed}
        prompt = PROMPTS[seed % 3]
        if seed % 2:
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **body)
            return "".join([chunk.choices[0].text async for chunk in stream])
        return (await client.completions.create(model=MODEL, prompt=prompt, **body)).choices[0].text

    async def ask_all() -> list[str]:
        async with demo.async_client() as client:
            return list(await asyncio.gather(*(ask(client, seed) for seed in range(16))))

    want = [offline(llm, PROMPTS[seed % 3], **{**DRAWN, "seed": seed}).outputs[0].text for seed in range(16)]
    assert asyncio.run(ask_all()) == want


def test_of_tokens_that_look_alike_the_likeliest_is_told() -> None:
    """Parts of characters all look like one sign."""
    entries = {7: Logprob(-0.1, 1, "\ufffd"), 8: Logprob(-1.0, 2, "a"), 9: Logprob(-4.0, 3, "\ufffd")}
    told = CompletionLogprobs(3, as_ids=False).of([7], [entries])
    assert told["top_logprobs"] == [{"\ufffd": -0.1, "a": -1.0}]
