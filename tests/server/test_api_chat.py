"""POST /v1/chat/completions, with OpenAI's client where that can say it: the same tokens and logprobs as LLM.chat."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from PIL import Image

from quire import LLM, BeamSearchParams
from quire.demo import picture_path
from tests.server.api_answers import conversed, events, joined, post, refusal, strict
from tests.server.api_server import ONE_THREAD, ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

PATH = "/v1/chat/completions"
MODEL = "quire-demo"
SEEN = "There is a red circle, a blue star and a yellow triangle."
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 24}
STORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "There is a green star and a black triangle. What color is the star?"},
    {"role": "assistant", "content": "Green."},
    {"role": "user", "content": "And the triangle?"},
]
WHO = [{"role": "user", "content": "Who are you?"}]
TOLD = [{"role": "user", "content": "There is a red star and a blue circle. Tell me a story."}]

Messages = list[dict[str, Any]]


def data_url(path: Path, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def seen(*parts: str | Path, **image: Any) -> Messages:
    """A message of texts and pictures."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Path):
            content.append({"type": "image_url", "image_url": {"url": data_url(part), **image}})
        else:
            content.append({"type": "text", "text": part})
    return [{"role": "user", "content": content}]


LOOK = seen(picture_path(), "What do you see?")


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another picture."""
    path = tmp_path_factory.mktemp("pictures") / "turned.png"
    Image.open(picture_path()).rotate(90).save(path)
    return path


# -- texts and pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [WHO, STORY, LOOK], ids=["short", "turns", "picture"])
def test_a_conversation_is_answered(client: OpenAI, llm: LLM, messages: Messages) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    want = conversed(llm, messages, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.outputs[0].text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL) and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    assert answer.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_picture_is_seen(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=LOOK, **GREEDY)
    assert answer.choices[0].message.content == SEEN


def test_texts_may_be_parts(http: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    assert post(http, PATH, messages=parts, **GREEDY)["choices"] == post(http, PATH, messages=WHO, **GREEDY)["choices"]


def test_pictures_stand_where_their_parts_do(http: Any, llm: LLM, turned: Path) -> None:
    first = seen(picture_path(), "What is this?", turned, "And this?")
    second = seen(turned, "What is this?", picture_path(), "And this?")
    for messages in (first, second):
        (choice,) = post(http, PATH, messages=messages, return_token_ids=True, max_tokens=30, **GREEDY)["choices"]
        want = conversed(llm, messages, max_tokens=30, **GREEDY).outputs[0]
        assert choice["token_ids"] == list(want.token_ids)
    tops = [post(http, PATH, messages=m, logprobs=True, max_tokens=1, **GREEDY)["choices"] for m in (first, second)]
    assert tops[0][0]["logprobs"] != tops[1][0]["logprobs"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(picture_path())},
        {"type": "input_image", "image_url": data_url(picture_path())},
        {"type": "image", "url": data_url(picture_path())},
    ],
)
def test_ways_to_give_a_picture(http: Any, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What do you see?"}]}]
    assert post(http, PATH, messages=messages, **GREEDY)["choices"][0]["message"]["content"] == SEEN


def test_a_marker_that_somebody_typed_stays_text(http: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "<|image|> What do you see?"}]
    answer = post(http, PATH, messages=messages, max_tokens=8, return_token_ids=True, **GREEDY)
    assert answer["choices"][0]["token_ids"] == list(
        conversed(llm, messages, max_tokens=8, **GREEDY).outputs[0].token_ids
    )


@pytest.mark.parametrize("model", ["french", "shout"])
def test_an_adapter_answers_by_its_name(client: OpenAI, llm: LLM, model: str) -> None:
    for messages in (LOOK, WHO):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, **GREEDY)
        assert answer.model == model
        assert (
            answer.choices[0].message.content
            == conversed(llm, messages, model, max_tokens=60, **GREEDY).outputs[0].text
        )
    assert answer.choices[0].message.content != conversed(llm, WHO, max_tokens=60, **GREEDY).outputs[0].text


def test_every_name_of_the_base_model_is_the_base_model(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="org/quire", messages=LOOK, **GREEDY)
    assert (answer.model, answer.choices[0].message.content) == ("org/quire", SEEN)


BAD_URLS = {
    "no image": "data:image/png;base64," + base64.b64encode(b"not a picture").decode(),
    "cut off": data_url(picture_path())[:400],
    "no base64": "data:image/png;base64,@@@",
    "no data": "data:image/png;base64,",
    "a file": picture_path().as_uri(),
    "a host": "http://127.0.0.1:9/picture.png",
    "no URL": "picture.png",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", BAD_URLS.values(), ids=BAD_URLS)
def test_a_bad_picture_is_the_callers_fault(client: OpenAI, url: str, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert "image" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([{"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "lowest"}}], "detail"),
        ([{"type": "image_url", "image_url": {"url": data_url(picture_path()), "max_pixels": 5}}], "max_pixels"),
        ([{"type": "image_url"}], "image_url"),
        ([{"type": "text", "text": "a", "image_url": {"url": "b"}}], "one content"),
        ([{"type": "text"}], "text"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "input_audio"),
        ([{"text": "a"}], "type"),
        (["a"], "object"),
        (5, "content"),
        (None, "content"),
    ],
)
def test_malformed_content_is_refused(http: Any, content: Any, word: str) -> None:
    for fields in ({}, {"stream": True}, {"echo": True, "continue_final_message": True}):
        role = "assistant" if "echo" in fields and content is not None else "user"
        error = refusal(http, PATH, messages=[{"role": role, "content": content}], **fields)
        assert error["param"] == "messages" and word in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "5", "tool_call_id": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]},
        {"content": "no role"},
        {"role": 5, "content": "a"},
        {"role": "x" * 100, "content": "a"},
    ],
)
def test_malformed_messages_are_refused(http: Any, message: dict[str, Any]) -> None:
    assert refusal(http, PATH, messages=[*WHO, message])["param"] == "messages"


def test_a_role_that_the_template_refuses(http: Any) -> None:
    assert "Unknown role: judge" in refusal(http, PATH, messages=[{"role": "judge", "content": "a"}])["message"]


# -- parameters --------------------------------------------------------------------------------------------------


def test_n_answers(client: OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=TOLD, n=4, **DRAWN)
    want = [out.text for out in conversed(llm, TOLD, n=4, **DRAWN).outputs]
    assert [choice.message.content for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(want)) > 1


def test_best_of(http: Any, llm: LLM) -> None:
    drawn = conversed(llm, TOLD, n=5, logprobs=0, **DRAWN).outputs
    best = sorted(drawn, key=lambda out: -(out.cumulative_logprob or 0) / len(out.token_ids))[:2]
    answer = post(http, PATH, messages=TOLD, n=2, best_of=5, **DRAWN)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [out.text for out in best]


@pytest.mark.parametrize("most", [None, 0, 3])
def test_logprobs_are_the_engines(client: OpenAI, llm: LLM, most: int | None) -> None:
    fields = {} if most is None else {"top_logprobs": most}
    answer = client.chat.completions.create(model=MODEL, messages=TOLD, logprobs=True, **fields, **DRAWN)
    want = conversed(llm, TOLD, logprobs=most or 0, **DRAWN).outputs[0]
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert want.logprobs is not None
    for shown, token, entries in zip(answer.choices[0].logprobs.content, want.token_ids, want.logprobs, strict=True):
        assert (shown.token, shown.logprob) == (entries[token].decoded_token, entries[token].logprob)
        assert bytes(shown.bytes or []).decode() == shown.token
        likeliest = sorted(entries.values(), key=lambda entry: entry.rank or 0)[: most or 0]
        assert [(top.token, top.logprob) for top in shown.top_logprobs] == [
            (entry.decoded_token, entry.logprob) for entry in likeliest
        ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"temperature": 1e9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": LOOK, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_an_impossible_value_names_its_field(http: Any, fields: dict[str, Any], param: str) -> None:
    error = refusal(http, PATH, **{"messages": WHO, **fields})
    assert error["param"] == param and error["message"].startswith(param)


def test_the_three_ways_to_end(http: Any) -> None:
    length = post(http, PATH, messages=WHO, max_completion_tokens=3, **GREEDY)
    assert (length["choices"][0]["finish_reason"], length["usage"]["completion_tokens"]) == ("length", 3)
    assert post(http, PATH, messages=WHO, max_tokens=3, **GREEDY)["choices"] == length["choices"]
    ended = post(http, PATH, messages=WHO, **GREEDY)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    stopped = post(http, PATH, messages=LOOK, stop=["blue"], **GREEDY)["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "blue")
    assert stopped["message"]["content"] == SEEN.partition("blue")[0]


def test_truncated_conversations(http: Any) -> None:
    whole = post(http, PATH, messages=STORY, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    cut = post(http, PATH, messages=STORY, return_token_ids=True, max_tokens=1, truncate_prompt_tokens=5)
    assert cut["prompt_token_ids"] == whole[-5:]


def test_prompt_logprobs(http: Any, llm: LLM) -> None:
    want = conversed(llm, WHO, prompt_logprobs=1, **GREEDY).prompt_logprobs
    shown = post(http, PATH, messages=WHO, prompt_logprobs=1, **GREEDY)["prompt_logprobs"]
    assert want is not None and shown[0] is None and len(shown) == len(want)
    for entries, others in zip(shown[1:], want[1:], strict=True):
        assert others is not None
        assert {int(token): entry["logprob"] for token, entry in entries.items()} == {
            token: entry.logprob for token, entry in others.items()
        }


def test_beams(http: Any, llm: LLM) -> None:
    params = BeamSearchParams(3, 10)
    tokens = post(http, "/tokenize", messages=TOLD)["tokens"]
    want = llm.beam_search([{"prompt_token_ids": tokens}], params)[0].sequences
    answer = post(http, PATH, messages=TOLD, use_beam_search=True, n=3, max_tokens=10, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam.tokens[len(tokens) :] for beam in want]
    strict(ChatCompletion, answer)


def test_processor_settings_reach_the_pictures(http: Any) -> None:
    def first(**settings: Any) -> Any:
        body = {"messages": LOOK, "logprobs": True, "max_tokens": 1, "mm_processor_kwargs": settings}
        return post(http, PATH, **body, **GREEDY)["choices"][0]["logprobs"]

    assert first() != first(image_mean=[0.9, 0.9, 0.9])
    assert "nonsense" in refusal(http, PATH, messages=LOOK, mm_processor_kwargs={"nonsense": 1})["message"]
    for name, value in (("image_std", [1e-30] * 3), ("image_mean", 1e308), ("rescale_factor", 1e300)):
        error = refusal(http, PATH, messages=LOOK, mm_processor_kwargs={name: value})
        assert error["param"] == "mm_processor_kwargs" and name in error["message"]
    error = refusal(http, PATH, messages=LOOK, mm_processor_kwargs={"size": {"height": 7071, "width": 7071}})
    assert "the tower takes [3, 96, 96]" in error["message"] and "mm_processor_kwargs has size" in error["message"]


# -- how the answer begins --------------------------------------------------------------------------------------

OPEN = [*WHO, {"role": "assistant", "content": "I am"}]


def test_the_last_message_may_be_continued(http: Any, llm: LLM) -> None:
    tokens = post(http, "/tokenize", messages=OPEN, continue_final_message=True, add_generation_prompt=False)["tokens"]
    answer = post(http, PATH, messages=OPEN, continue_final_message=True, return_token_ids=True, **GREEDY)
    assert answer["prompt_token_ids"] == tokens
    decode = llm.get_tokenizer().decode
    assert decode(tokens) == "<|bos|><|user|>Who are you?<|end|><|assistant|>I am"
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith(" ") and not text.startswith("I am")
    echoed = post(http, PATH, messages=OPEN, continue_final_message=True, echo=True, **GREEDY)
    assert echoed["choices"][0]["message"]["content"] == "I am" + text
    chunks = events(http, PATH, messages=OPEN, continue_final_message=True, echo=True, **GREEDY)
    assert joined(chunks)[0]["text"] == "I am" + text


def test_echo_repeats_no_other_roles_message(http: Any) -> None:
    plain = post(http, PATH, messages=WHO, **GREEDY)["choices"]
    assert post(http, PATH, messages=WHO, echo=True, **GREEDY)["choices"] == plain


def test_without_a_generation_prompt_the_answer_is_not_opened(http: Any, llm: LLM) -> None:
    answer = post(http, PATH, messages=WHO, add_generation_prompt=False, return_token_ids=True, max_tokens=1)
    assert llm.get_tokenizer().decode(answer["prompt_token_ids"]) == "<|bos|><|user|>Who are you?<|end|>"


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "params"),
    [
        (STORY, GREEDY),
        (LOOK, GREEDY),
        (TOLD, {**DRAWN, "n": 3}),
        (TOLD, {**GREEDY, "n": 2}),
        (TOLD, {**DRAWN, "stop": ["the"]}),
    ],
    ids=["turns", "picture", "three", "equal", "stop"],
)
def test_a_stream_makes_the_same_texts_and_tokens(
    http: Any, llm: LLM, messages: Messages, params: dict[str, Any]
) -> None:
    whole = post(http, PATH, messages=messages, return_token_ids=True, **params)
    chunks = events(http, PATH, messages=messages, return_token_ids=True, **params)
    parts, want = joined(chunks), conversed(llm, messages, **params).outputs
    assert sorted(parts) == list(range(len(want)))
    for index, out in enumerate(want):
        choice = whole["choices"][index]
        assert parts[index]["text"] == choice["message"]["content"] == out.text
        assert parts[index]["tokens"] == choice["token_ids"] == list(out.token_ids)
        assert parts[index]["finish_reason"] == choice["finish_reason"] == out.finish_reason
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_only_a_choices_first_chunk_has_the_role(http: Any) -> None:
    for index in range(3):
        chunks = events(http, PATH, messages=TOLD, n=3, **DRAWN)
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert len(deltas) > 3 and all("role" not in delta for delta in deltas[1:])


def test_a_streams_logprobs_are_the_whole_answers(http: Any) -> None:
    body = {"messages": TOLD, "logprobs": True, "top_logprobs": 2, **DRAWN}
    (whole,) = post(http, PATH, **body)["choices"]
    chunks = events(http, PATH, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == whole["logprobs"]["content"]


def test_usage_at_the_end_and_in_every_chunk(http: Any) -> None:
    usage = post(http, PATH, messages=TOLD, **DRAWN)["usage"]
    *chunks, last = events(http, PATH, messages=TOLD, stream_options={"include_usage": True}, **DRAWN)
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, also = events(http, PATH, messages=TOLD, stream_options=options, **DRAWN)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts)) and counts[0] >= 1
    for one in (last, also):
        assert one["usage"]["completion_tokens"] == counts[-1] == usage["completion_tokens"]
        assert one["usage"]["prompt_tokens"] == usage["prompt_tokens"]


def test_a_stream_through_the_client(client: OpenAI) -> None:
    text, finish = "", None
    with client.chat.completions.create(model=MODEL, messages=LOOK, stream=True, **GREEDY) as stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason
    assert (text, finish) == (SEEN, "stop")


@pytest.mark.parametrize("messages", [TOLD, LOOK], ids=["text", "picture"])
def test_bodies_are_what_the_openai_package_says(http: Any, messages: Messages) -> None:
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "n": 2, **DRAWN}
    answer = post(http, PATH, **body)
    assert strict(ChatCompletion, answer).created > 1_600_000_000
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    for choice in answer["choices"]:
        assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
        assert set(choice["message"]) == {"role", "content", "refusal"}
    chunks = events(http, PATH, stream_options={"include_usage": True}, **body)
    assert len({strict(ChatCompletionChunk, chunk).id for chunk in chunks}) == 1
    assert len(chunks) > 10


# -- many at once --------------------------------------------------------------------------------------------------


def test_sixteen_at_once_get_what_each_gets_alone(demo: ServerProcess, llm: LLM) -> None:
    """Pictures and none, adapters and none, streamed and whole, in one batch."""
    models = (MODEL, "french", "shout", "org/quire")

    def asked(number: int) -> dict[str, Any]:
        messages = (LOOK, WHO, TOLD, STORY)[number // 4]
        return {"model": models[number % 4], "messages": messages, **DRAWN, "seed": number}

    async def ask(client: Any, number: int) -> str:
        if number % 3:
            answer = await client.chat.completions.create(**asked(number))
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(stream=True, **asked(number))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with demo.async_client() as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(16))))

    got = asyncio.run(ask_all())
    for number, text in enumerate(got):
        body = asked(number)
        adapter = body.pop("model")
        alone = conversed(llm, body.pop("messages"), adapter if adapter in ("french", "shout") else None, **body)
        assert text == alone.outputs[0].text, number


# -- a server with a template and defaults of its own ---------------------------------------------------------------

TEMPLATE = """{{- bos_token -}}
{%- for document in documents or [] -%} ({{ document['title'] }}: {{ document['text'] }}) {%- endfor -%}
{%- for message in messages -%} [{{ message['role'] }}] {{ message['content'] }} {%- endfor -%}
{{- word | default('') -}}
{%- if add_generation_prompt -%} [answer] {%- endif -%}"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    defaults = '{"temperature": 0, "max_tokens": 3}'
    options = [
        "--chat-template",
        str(file),
        "--response-role",
        "answer",
        "--max-logprobs",
        "-1",
        "--max-model-len",
        "256",
    ]
    with ServerProcess(*options, "--override-generation-config", defaults, **ONE_THREAD) as server:
        yield server


def test_a_servers_template(other: ServerProcess, llm: LLM) -> None:
    def prompt(**fields: Any) -> str:
        with other.http() as http:
            answer = post(http, PATH, messages=STORY[:2], return_token_ids=True, **fields)
        return llm.get_tokenizer().decode(answer["prompt_token_ids"])

    turns = "".join(f"[{message['role']}] {message['content']}" for message in STORY[:2])
    assert prompt() == f"<|bos|>{turns}[answer]"
    assert prompt(add_generation_prompt=False) == f"<|bos|>{turns}"
    assert prompt(chat_template_kwargs={"word": "now"}) == f"<|bos|>{turns}now[answer]"
    documents = [{"title": "one", "text": "a red star"}, {"title": "two", "text": "a hat"}]
    assert prompt(documents=documents) == f"<|bos|>(one: a red star)(two: a hat){turns}[answer]"


def test_a_servers_defaults(other: ServerProcess) -> None:
    with other.http() as http:
        answers = [post(http, PATH, messages=WHO) for _ in range(2)]
        longer = post(http, PATH, messages=WHO, max_tokens=5, ignore_eos=True)
        completed = post(http, "/v1/completions", prompt="Once upon a time")
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["message"]["role"] == "answer"
    assert [one["usage"]["completion_tokens"] for one in (*answers, longer, completed)] == [3, 3, 5, 3]


def test_logprobs_of_the_whole_vocabulary(other: ServerProcess) -> None:
    with other.http() as http:
        chat = post(http, PATH, messages=WHO, logprobs=True, top_logprobs=-1, max_tokens=1)
        ids = {"logprobs": -1, "max_tokens": 1, "return_tokens_as_token_ids": True}
        text = post(http, "/v1/completions", prompt="Once upon a time", **ids)
        assert refusal(http, "/v1/completions", prompt="a" * 10, max_tokens=1, logprobs=-2)["param"] == "logprobs"
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == len(text["choices"][0]["logprobs"]["top_logprobs"][0]) == 1025
    assert sum(2.718281828459045 ** top["logprob"] for top in entry["top_logprobs"]) == pytest.approx(1)


def test_an_answer_is_no_longer_than_the_model(other: ServerProcess) -> None:
    with other.http() as http:
        answer = post(http, PATH, messages=WHO, max_tokens=10**6, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


# -- what goes to templates ----------------------------------------------------------------------------------------

KEYS = {f"k{number}": 1 for number in range(50_000)}
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "variables": ({"messages": WHO, "chat_template_kwargs": KEYS}, "chat_template_kwargs"),
    "values of a variable": ({"messages": WHO, "chat_template_kwargs": {"a": [[1] * 50_000]}}, "chat_template_kwargs"),
    "a text": ({"messages": WHO, "chat_template_kwargs": {"a": "x" * (3 << 20)}}, "chat_template_kwargs"),
    "keys of a message": ({"messages": [{**WHO[0], **KEYS}]}, "messages"),
    "a value of a message": ({"messages": [{**WHO[0], "name": [1] * 50_000}]}, "messages"),
    "keys of a part": ({"messages": [{"role": "user", "content": [{"type": "text", **KEYS}]}]}, "messages"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_is_too_much_for_a_template_is_refused_before_it_is_written_out(http: Any, case: str) -> None:
    """Everybody waits while it is: 300,000 variables held the server for three seconds."""
    body, field = TOO_MUCH[case]
    for path in (PATH, "/tokenize"):
        more = {} if path == "/tokenize" else {"max_tokens": 1}
        error = refusal(http, path, **body, **more)
        assert error["param"] == field and "too much for a chat template" in error["message"]


def test_documents_count_too(http: Any) -> None:
    documents = [{"text": "a"}] * 25_000
    assert "too much" in refusal(http, PATH, messages=WHO, documents=documents)["message"]
    assert post(http, PATH, messages=WHO, documents=documents[:5000], max_tokens=1)["choices"]
