"""/v1/messages: the answers are those of /v1/chat/completions, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.demo import picture_path
from tests.server.api_answers import conversed, post
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.messages.helpers import (
    CHAT,
    COUNT,
    PICTURE,
    STAR,
    asked,
    comparable,
    deltas,
    events,
    message,
    refusal,
    sdk,
    streamed,
    text_of,
    user,
)

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
TEMPLATE = (  # each turn as it comes, its reasoning and what else is of interest
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}]{% endfor %}"
    "{{ enable_thinking }}{% if add_generation_prompt %}[assistant|{% endif %}"
)


@pytest.fixture(scope="module")
def plain(chat_model: Path) -> Iterator[Any]:
    """A server whose template shows what it gets, and knows thinking."""
    engine = {"model": str(chat_model), "max_model_len": 512, "num_gpu_blocks_override": 128}
    with LocalServer(engine, chat_template=TEMPLATE) as server:
        with server.http() as http:
            yield http
        server.until_idle()


# -- whole and streamed --------------------------------------------------------------------------------------------


def test_the_answer_is_the_engines(http: Any, llm: LLM) -> None:
    answer = message(http, **asked(model="org/quire"))
    want = conversed(llm, [user(STAR)], temperature=0, max_tokens=16)
    assert answer["content"] == [{"type": "text", "text": want.outputs[0].text}]
    assert (answer["role"], answer["model"], answer["stop_reason"]) == ("assistant", "org/quire", "end_turn")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(want.prompt_token_ids or ())
    assert usage["output_tokens"] == len(want.outputs[0].token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 2},
        {"stop_sequences": ["d", "zzz"]},
        {"temperature": 1.0, "seed": 5, "top_k": 20},
        {"model": "french", "max_tokens": 9},
        {"system": [{"type": "text", "text": "Be brief."}]},
        {"messages": [user([IMAGE, {"type": "text", "text": "What do you see?"}])]},
    ],
)
def test_streams_put_together_are_the_whole(demo: ServerProcess, http: Any, fields: dict[str, Any]) -> None:
    whole = message(http, **asked(**fields))
    found = events(http, **asked(**fields))
    assert deltas(found, "text_delta", "text") == text_of(whole)
    with sdk(demo.url) as client:
        final, seen = streamed(client, **asked(**fields))
    named = {"model": whole["model"]} if "model" not in fields else {}
    assert comparable(final.to_dict(exclude_none=True) | named) == comparable(whole)
    assert [event.type for event in seen].count("content_block_stop") == len(whole["content"])


def test_why_it_ended(http: Any) -> None:
    assert message(http, **asked(max_tokens=2))["stop_reason"] == "max_tokens"
    stopped = message(http, **asked(stop_sequences=["zzz", "d"]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "d")
    assert "d" not in text_of(stopped)
    *_, delta, _ = events(http, **asked(stop_sequences=["d"]))
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "d"}


def test_the_answer_goes_on_with_the_last_message(http: Any) -> None:
    begun = [user(STAR), {"role": "assistant", "content": [{"type": "text", "text": "R"}]}]
    answer = message(http, **asked(messages=begun))
    chat = post(
        http, CHAT, messages=[user(STAR), {"role": "assistant", "content": "R"}], temperature=0, max_tokens=16,
        continue_final_message=True, add_generation_prompt=False,
    )  # fmt: skip
    assert text_of(answer) == chat["choices"][0]["message"]["content"] != ""


def test_pictures(http: Any, llm: LLM) -> None:
    question = {"type": "text", "text": "What do you see?"}
    answer = message(http, **asked([IMAGE, question]))
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    want = conversed(llm, [user([part, question])], temperature=0, max_tokens=16).outputs[0].text
    assert text_of(answer) == want
    count = http.post(COUNT, json={"messages": [user([IMAGE, question])]}).json()["input_tokens"]
    assert count == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > 40
    url = {"type": "image", "source": {"type": "url", "url": picture_path().as_uri()}}
    assert "image 0: file: URLs are off" in refusal(http, **asked([url, question]))  # no folder is allowed


def test_tokens_are_counted_as_they_are_used(http: Any) -> None:
    for body in ({"messages": [user(STAR)]}, {"messages": [user(STAR)], "system": "Be brief."}):
        answer = message(http, **body, max_tokens=1)
        count = http.post(COUNT, json={**body, "model": "shout"}).json()
        assert count == {"input_tokens": answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]}


# -- what the template gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": [user("a")]}, [user("a")]),
        ({"messages": [user([{"type": "text", "text": "a"}])]}, [user("a")]),
        ({"messages": [user("a")], "system": "s"}, [{"role": "system", "content": "s"}, user("a")]),
        (
            {"messages": [user("a")], "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]},
            [{"role": "system", "content": "s\nt"}, user("a")],
        ),
        ({"messages": [user("a"), user([{"type": "text", "text": "b"}])]}, [user("a\nb")]),
        (
            {
                "messages": [
                    user("a"),
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": ""},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "b"},
                            {"type": "text", "text": "c"},
                        ],
                    },
                    {"role": "system", "content": "s"},
                    user("d"),
                ]
            },
            [
                user("a"),
                {"role": "assistant", "content": "bc", "reasoning_content": "hm"},
                {"role": "system", "content": "s"},
                user("d"),
            ],
        ),
        (
            {
                "messages": [
                    user(
                        [
                            {
                                "type": "document",
                                "title": "T",
                                "source": {"type": "text", "media_type": "text/plain", "data": "words"},
                            },
                            {"type": "document", "source": {"type": "content", "content": "more"}},
                        ]
                    )
                ]
            },
            [user("T\nwords\nmore")],
        ),
    ],
)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_conversations_are_what_chat_has_for_them(
    plain: Any, body: dict[str, Any], chat: list[Any], thinking: bool | None
) -> None:
    """Nothing but the template's variable differs: thinking is off where nobody asks for it."""
    kinds = {True: {"type": "enabled", "budget_tokens": 1024}, False: {"type": "disabled"}}
    more = {} if thinking is None else {"thinking": kinds[thinking]}
    if thinking and "thinking_token_budget" in _refused():
        assert "thinking.budget_tokens" in refusal(plain, max_tokens=4, **body, **more)
        more = {"thinking": {"type": "adaptive"}}
    kwargs = {"enable_thinking": bool(thinking)}
    want = post(
        plain, CHAT, messages=chat, chat_template_kwargs=kwargs, max_tokens=4, temperature=0, return_token_ids=True
    )
    answer = message(plain, **{"max_tokens": 4, "temperature": 0, **body, **more})
    assert text_of(answer) == want["choices"][0]["message"]["content"]
    count = plain.post(COUNT, json={**body, **more}).json()["input_tokens"]
    assert count == len(want["prompt_token_ids"])


def _refused() -> set[str]:
    from quire.server.schemas.fields import REFUSED_IN_CHAT

    return set(REFUSED_IN_CHAT)
