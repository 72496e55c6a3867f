"""`LLM.chat`: tools, shapes and reasoning, of a model that says what it is told to."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire import LLM, BeamSearchParams, GuidedDecodingParams, RequestError, SamplingParams, StructuredOutputsParams
from tests.server.chat.scripted import TAGS, TEMPLATE, Scripted
from tests.server.fixtures import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = [{"role": "user", "content": "ab"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module", params=["tags as text", "tags as special tokens"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_model(tmp_path_factory.mktemp("chat"), TEMPLATE)
    if "special" in request.param:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
        tokenizer.save_pretrained(path)
    return LLM(str(path), num_gpu_blocks_override=256, logits_processors=[Scripted], tool_strict=False)


def saying(llm: LLM, text: str, **params: Any) -> SamplingParams:
    """Parameters of an answer that is this text."""
    tokenizer = llm.get_tokenizer()
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return SamplingParams(**{"temperature": 0, "max_tokens": len(ids) + 50, "extra_args": {"script": ids}, **params})


def test_a_completion_has_its_message_beside_its_text(llm: LLM) -> None:
    said = f"<think>Hm.</think>\n\nLet me see.\n{CALL}"
    params = saying(llm, said)
    (output,) = llm.chat(ASKED, params, use_tqdm=False, tools=[weather])
    (made,) = output.outputs
    assert made.message is not None
    (call,) = made.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert (made.message.reasoning, (made.message.content or "").strip()) == ("Hm.", "Let me see.")
    raw = llm.generate({"prompt_token_ids": output.prompt_token_ids}, params, use_tqdm=False)[0].outputs[0]
    assert (made.text, made.token_ids) == (raw.text, raw.token_ids)
    assert raw.message is None and output.prompt is not None and "The weather in a city." in output.prompt
    assert pickle.loads(pickle.dumps(output)) == output


def test_without_tools_calls_are_content_and_reasoning_is_told_apart(llm: LLM) -> None:
    (output,) = llm.chat(ASKED, saying(llm, f"<think>Hm.</think>{CALL}", n=2), use_tqdm=False)
    for made in output.outputs:
        assert made.message is not None and not made.message.tool_calls
        assert made.message.reasoning == "Hm." and '"city": "Rome"' in (made.message.content or "")


def test_tools_that_are_not_to_be_called_are_not_shown_and_calls_of_them_left_out(llm: LLM) -> None:
    said = saying(llm, f"<think>Hm.</think>La.{CALL}")
    (output,) = llm.chat(ASKED, said, use_tqdm=False, tools=[weather], tool_choice="none")
    message = output.outputs[0].message
    assert message is not None and not message.tool_calls
    assert (message.reasoning, (message.content or "").strip()) == ("Hm.", "La.")
    assert output.prompt is not None and "The weather in a city." not in output.prompt


def test_several_conversations_with_parameters_of_their_own(llm: LLM) -> None:
    params = [saying(llm, "a"), saying(llm, CALL), saying(llm, "<think>b</think>c")]
    outputs = llm.chat([ASKED] * 3, params, use_tqdm=False, tools=[weather])
    messages = [output.outputs[0].message for output in outputs]
    assert [(one and one.content, one and one.reasoning) for one in messages] == [("a", None), (None, None), ("c", "b")]
    assert [len(one.tool_calls) for one in messages if one] == [0, 1, 0]


def test_shapes_begin_behind_the_reasoning(llm: LLM) -> None:
    shape = StructuredOutputsParams(regex="(yes|no)!")
    thinking = [*ASKED, {"role": "assistant", "content": "<think>"}]
    (output,) = llm.chat(
        thinking, saying(llm, "Hm, 5.</think>", structured_outputs=shape), use_tqdm=False,
        add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    message = output.outputs[0].message
    assert message is not None and message.reasoning == "Hm, 5." and message.content in ("yes!", "no!")
    off = {"enable_thinking": False}
    (output,) = llm.chat(ASKED, saying(llm, "", structured_outputs=shape), use_tqdm=False, chat_template_kwargs=off)
    assert output.outputs[0].text in ("yes!", "no!")


@pytest.mark.parametrize("budget", [0, 3])
def test_reasoning_is_made_to_end(llm: LLM, budget: int) -> None:
    params = saying(llm, "<think>" + "ab" * 40, thinking_token_budget=budget, max_tokens=40)
    (made,) = llm.chat(ASKED, params, use_tqdm=False)[0].outputs
    assert made.message is not None
    assert (made.message.reasoning or "") == "aba"[:budget] and made.message.content


def test_what_cannot_be_is_refused(llm: LLM) -> None:
    for given, said in (
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function"),
        ({"tools": [weather], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"tools": [weather], "chat_template": "{{ messages[0].content }}"}, "no place for tools"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.chat(ASKED, saying(llm, "a"), use_tqdm=False, **given)  # type: ignore[arg-type]
    shaped = saying(llm, "a", structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="structured_outputs: tool_choice asks for calls alone"):
        llm.chat(ASKED, shaped, use_tqdm=False, tools=[weather], tool_choice="required")
    beams = llm.chat(ASKED, BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)[0].outputs
    assert all(beam.message is not None and beam.message.content == beam.text for beam in beams)


def test_guided_decoding_is_structured_outputs_by_its_old_name(tmp_path: Path) -> None:
    guided = GuidedDecodingParams(choice=["yes", "no"], backend="xgrammar", disable_fallback=True)
    params = SamplingParams(guided_decoding=guided, max_tokens=9)
    assert params.structured_outputs == guided and replace(params, n=2).structured_outputs == guided
    assert pickle.loads(pickle.dumps(params)) == params
    made = LLM(str(make_model(tmp_path, None)), num_gpu_blocks_override=64).generate("ab", params, use_tqdm=False)
    assert made[0].outputs[0].text in ("yes", "no")
    assert GuidedDecodingParams({"type": "object"}).json == {"type": "object"}
    assert GuidedDecodingParams.from_optional(json=None, regex="a") == GuidedDecodingParams(regex="a")
    assert GuidedDecodingParams.from_optional(json=None) is None
    with pytest.raises(RequestError, match="exactly one"):
        GuidedDecodingParams(regex="a", choice=["a"])
    with pytest.raises(RequestError, match="guided_decoding"):
        SamplingParams(guided_decoding=guided, structured_outputs=StructuredOutputsParams(regex="a"))
