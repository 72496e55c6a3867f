"""The formats of chat that families' checkpoints have. The templates are ours: what they write is the families'."""

from __future__ import annotations

from typing import Any

from tests.models.chat.format import ALONE, TALK, TOOL, TURNS, Case, ChatFormat, Refused
from tests.models.chat.latent_formats import LATENTS

_TOOL = '{"type": "function", "function": {"name": "look", "parameters": {"properties": {"far": {}, "at": {}}}}}'
_TOOLS = {"tools": [TOOL]}
_CLOSED = {"add_generation_prompt": False}
_OPENED = {**_CLOSED, "continue_final_message": True}
_TWICE = (ALONE[0], ALONE[0])
_THOUGHT = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Yes.", "reasoning_content": "So"})
_DOCUMENTS = [{"title": "one", "text": "a"}, {"title": "two", "text": "b"}]


def _given(**variables: Any) -> dict[str, Any]:
    return {"template_kwargs": variables}


def _chatml(*turns: str, bos: str = "") -> str:
    """Turns as "role text", and the answer's beginning."""
    written = (turn.partition(" ") for turn in turns)
    return bos + "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in written)


_TOLD = "system Be brief."
_ASKED = ("user Is 1 < é?", "assistant Yes.", "user Why?")
_ANSWER = "<|im_start|>assistant\n"
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML: dict[str, ChatFormat] = {
    "chatml": ChatFormat(
        "chatml", _CHATML, eos="<|im_end|>",
        cases=(
            Case(TALK, _chatml(_TOLD, *_ASKED) + _ANSWER),
            Case(TURNS, _chatml("system You are a helpful assistant.", *_ASKED) + _ANSWER),
            Case(TALK, _chatml(_TOLD, *_ASKED), _CLOSED),
            Case(TALK[:3], _chatml(_TOLD, *_ASKED[:2]).removesuffix("<|im_end|>\n"), _OPENED),
        ),
    ),
    "chatml_with_bos": ChatFormat(
        "chatml_with_bos", ("<s>", "</s>", *_CHATML[1:]), bos="<s>", eos="<|im_end|>",
        cases=(
            Case(TALK, _chatml(_TOLD, *_ASKED, bos="<s>") + _ANSWER),
            Case(TURNS, _chatml(*_ASKED, bos="<s>"), _CLOSED),
        ),
    ),
    "qwen3": ChatFormat(
        "qwen3", (*_CHATML, "<think>", "</think>"), eos="<|im_end|>", stored="files",
        cases=(
            Case(TALK, _chatml(_TOLD, *_ASKED) + _ANSWER),
            Case(TURNS, _chatml(*_ASKED) + _ANSWER, _given(enable_thinking=True)),
            Case(TURNS, _chatml(*_ASKED) + _ANSWER + "<think>\n\n</think>\n\n", _given(enable_thinking=False)),
            Case(ALONE, _chatml(f"system \n{_TOOL}", _ASKED[0]) + _ANSWER, _TOOLS),
            Case([ALONE[0], {"role": "assistant", "content": "<think>\nSo\n</think>\n\nYes."}, TALK[3]],
                 _chatml(*_ASKED) + _ANSWER),
            Case(_THOUGHT, _chatml("user Why?", "assistant <think>\nSo\n</think>\n\nYes."), _CLOSED),
            Case([_THOUGHT[0], {"role": "assistant", "content": "Yes.", "reasoning": "So", "refusal": None}],
                 _chatml("user Why?", "assistant <think>\nSo\n</think>\n\nYes."), _CLOSED),
        ),
    ),
    "smollm3": ChatFormat(
        "smollm3", (*_CHATML, "<think>", "</think>"), eos="<|im_end|>", stored="files",
        cases=(
            Case(TALK, _chatml("system Reasoning Mode: /think\n\nBe brief.", *_ASKED) + _ANSWER),
            Case(TURNS, _chatml("system Reasoning Mode: /no_think\n\n", *_ASKED) + _ANSWER + "<think>\n\n</think>\n",
                 _given(enable_thinking=False)),
            Case([{"role": "system", "content": "Be brief. /no_think"}, *ALONE],
                 _chatml("system Reasoning Mode: /no_think\n\nBe brief.", _ASKED[0])
                 + _ANSWER + "<think>\n\n</think>\n"),
        ),
    ),
    "phi4": ChatFormat(
        "phi4", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"), eos="<|im_end|>",
        cases=(
            Case(TALK, "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Is 1 < é?<|im_end|>"
                 "<|im_start|>assistant<|im_sep|>Yes.<|im_end|><|im_start|>user<|im_sep|>Why?<|im_end|>"
                 "<|im_start|>assistant<|im_sep|>"),
        ),
    ),
}  # fmt: skip


def _llama3(day: str, told: str = "") -> str:
    turns = [("system", f"Today Date: {day}\n\n{told}"), ("user", "Is 1 < é?"), ("assistant", "Yes."), ("user", "Why?")]
    written = "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>" for role, text in turns)
    return f"<|begin_of_text|>{written}<|start_header_id|>assistant<|end_header_id|>\n\n"


_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA_TURNS = (
    "Is 1 < é?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n"
    "<start_of_turn>model\n"
)
LLAMAS: dict[str, ChatFormat] = {
    "llama2": ChatFormat(
        "llama2", ("<unk>", "<s>", "</s>"), bos="<s>", eos="</s>",
        cases=(
            Case(TALK, "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nIs 1 < é? [/INST] Yes. </s><s>[INST] Why? [/INST]"),
            Case(ALONE, "<s>[INST] Is 1 < é? [/INST]"),
        ),
        refused=(Refused(_TWICE, "expected a message of the assistant, and got one of the user"),),
    ),
    "llama3": ChatFormat(
        "llama3", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>",
        cases=(
            Case(TALK, _llama3("@(%d %b %Y)", "Be brief.")),
            Case(TURNS, _llama3("26 Jul 2024"), _given(date_string="26 Jul 2024")),
        ),
    ),
    "llama4": ChatFormat(
        "llama4", ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        bos="<|begin_of_text|>", eos="<|eot|>", stored="files",
        cases=(
            Case([{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
                 "<|begin_of_text|><|header_start|>user<|header_end|>\n\nWhy?<|eot|>"
                 "<|header_start|>assistant<|header_end|>\n\n"),
        ),
    ),
    "deepseek": ChatFormat(
        "deepseek", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>",
        cases=(
            Case(TALK, "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Is 1 < é?<｜Assistant｜>Yes.<｜end▁of▁sentence｜>"
                 "<｜User｜>Why?<｜Assistant｜>"),
        ),
    ),
    "mistral": ChatFormat(
        "mistral", ("<unk>", "<s>", "</s>"), bos="<s>", eos="</s>",
        cases=(
            Case(TURNS, "<s>[INST] Is 1 < é? [/INST]Yes.</s>[INST] Why? [/INST]"),
            Case([{"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "text", "text": "So"}]}],
                 "<s>[INST] Why?\nSo [/INST]"),
        ),
        refused=(
            Refused(TALK, "this model takes turns of user and assistant, beginning with the user"),
            Refused(_TWICE, "this model takes turns of user and assistant, beginning with the user"),
        ),
    ),
    "mistral_v3": ChatFormat(
        "mistral_v3", ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        bos="<s>", eos="</s>",
        cases=(
            Case(TALK, "<s>[INST] Is 1 < é?[/INST] Yes.</s>[INST] Be brief.\n\nWhy?[/INST]"),
            Case(ALONE, f"<s>[AVAILABLE_TOOLS] [{_TOOL}][/AVAILABLE_TOOLS][INST] Is 1 < é?[/INST]", _TOOLS),
        ),
        refused=(Refused(_TWICE, "turn 2 is of the user"),),
    ),
    "zephyr": ChatFormat(
        "zephyr", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"), eos="<|endoftext|>",
        cases=(
            Case(TALK, "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nIs 1 < é?<|endoftext|>\n<|assistant|>\n"
                 "Yes.<|endoftext|>\n<|user|>\nWhy?<|endoftext|>\n<|assistant|>\n"),
        ),
    ),
    "parts_only": ChatFormat(
        "parts_only", ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"), bos="<s>", eos="</s>",
        stored="processor", takes_texts=False,
        cases=(
            Case(TALK, "<s><|system|>Be brief.</s><|user|>Is 1 < é?</s><|assistant|>Yes.</s><|user|>Why?</s>"
                 "<|assistant|>"),
        ),
    ),
    "gemma": ChatFormat(
        "gemma", _GEMMA, bos="<bos>", eos="<eos>",
        cases=(Case(TURNS, f"<bos><start_of_turn>user\n{_GEMMA_TURNS}"),),
        refused=(
            Refused(TALK, "this model knows no system message"),
            Refused(_TWICE, "two messages of the user follow each other"),
        ),
    ),
    "gemma3": ChatFormat(
        "gemma3", _GEMMA, bos="<bos>", eos="<end_of_turn>", stored="processor",
        cases=(
            Case(TALK, f"<bos><start_of_turn>user\nBe brief.\n\n{_GEMMA_TURNS}"),
            Case([{"role": "user", "content": [{"type": "text", "text": "Why? "}]}],
                 "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"),
        ),
        refused=(Refused(_TWICE, "two messages of the user follow each other"),),
    ),
    "phi3": ChatFormat(
        "phi3", ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), bos="<s>",
        eos="<|endoftext|>",
        cases=(
            Case(TALK, "<|system|>\nBe brief.<|end|>\n<|user|>\nIs 1 < é?<|end|>\n<|assistant|>\nYes.<|end|>\n"
                 "<|user|>\nWhy?<|end|>\n<|assistant|>\n"),
            Case(ALONE, "<|user|>\nIs 1 < é?<|end|>\n<|endoftext|>", _CLOSED),
        ),
    ),
    "phi4_mini": ChatFormat(
        "phi4_mini",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
        eos="<|endoftext|>",
        cases=(
            Case(TALK, "<|system|>Be brief.<|end|><|user|>Is 1 < é?<|end|><|assistant|>Yes.<|end|><|user|>Why?<|end|>"
                 "<|assistant|>"),
            Case([{**TALK[0], "tools": "[look]"}, *ALONE],
                 "<|system|>Be brief.<|tool|>[look]<|/tool|><|end|><|user|>Is 1 < é?<|end|><|assistant|>"),
        ),
    ),
}  # fmt: skip

_COHERE = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)  # fmt: skip
_OPEN, _END = _COHERE[1:3]
_COHERE_TOLD = f"<BOS_TOKEN>{_OPEN}<|SYSTEM_TOKEN|>"
_COHERE_ASKED = f"{_END}{_OPEN}<|USER_TOKEN|>Is 1 < é?{_END}{_OPEN}<|CHATBOT_TOKEN|>"
_TULU = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")


def _granite(told: str, controls: str = "") -> str:
    turns = [("system", told), ("user", "Is 1 < é?"), ("assistant", "Yes."), ("user", "Why?")]
    written = "".join(f"<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n" for role, text in turns)
    return f"{written}<|start_of_role|>assistant{controls}<|end_of_role|>"


OTHERS: dict[str, ChatFormat] = {
    "cohere": ChatFormat(
        {"default": "cohere", "tool_use": "cohere_tool_use", "rag": "cohere_rag"}, _COHERE, bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>", stored="list",
        cases=(
            Case(TALK, f"{_COHERE_TOLD}Be brief.{_COHERE_ASKED}Yes.{_END}{_OPEN}<|USER_TOKEN|>Why?{_END}{_OPEN}"
                 "<|CHATBOT_TOKEN|>"),
            Case(ALONE, f"{_COHERE_TOLD}Tools:\n1. look(at, far){_COHERE_ASKED}", _TOOLS),
            Case(ALONE, f"{_COHERE_TOLD}<results>\nDocument: 0\ntitle: one\ntext: a\nDocument: 1\ntitle: two\n"
                 f"text: b</results>{_COHERE_ASKED}", {"chat_template": "rag", **_given(documents=_DOCUMENTS)}),
        ),
    ),
    "cohere2": ChatFormat(
        {"default": "cohere2", "tool_use": "cohere_tool_use", "rag": "cohere_rag"},
        (*_COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"), bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>",
        stored="files",
        cases=(
            Case(TALK, f"{_COHERE_TOLD}Be brief.{_COHERE_ASKED}<|START_RESPONSE|>Yes.<|END_RESPONSE|>{_END}{_OPEN}"
                 f"<|USER_TOKEN|>Why?{_END}{_OPEN}<|CHATBOT_TOKEN|>"),
            Case(ALONE, f"{_COHERE_TOLD}Tools:\n1. look(at, far){_COHERE_ASKED}", _TOOLS),
            Case(ALONE, f"{_COHERE_TOLD}<results>\nDocument: 0\ntitle: one\ntext: a\nDocument: 1\ntitle: two\n"
                 f"text: b</results>{_COHERE_ASKED}", {"chat_template": "rag", **_given(documents=_DOCUMENTS)}),
        ),
    ),
    "granite": ChatFormat(
        "granite", ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        cases=(
            Case(TALK, _granite("Be brief.")),
            Case(TURNS, _granite("Knowledge Cutoff Date: April 2024.\nToday's Date: @(%B %d, %Y).")),
            Case(TALK, _granite("Be brief.", ' {"length": "short"}'), _given(controls={"length": "short"})),
        ),
    ),
    "nemotron": ChatFormat(
        "nemotron", ("<s>", "</s>", "<extra_id_0>", "<extra_id_1>"), bos="<s>", eos="</s>",
        cases=(
            Case(TALK, "<extra_id_0>System\nBe brief.\n\n<extra_id_1>User\nIs 1 < é?\n<extra_id_1>Assistant\nYes.\n"
                 "<extra_id_1>User\nWhy?\n<extra_id_1>Assistant\n"),
            Case(ALONE, "<extra_id_0>System\n\n<extra_id_1>User\nIs 1 < é?\n<extra_id_1>Assistant\n"),
        ),
    ),
    "exaone4": ChatFormat(
        "exaone4", ("[BOS]", "[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]", "<think>", "</think>"),
        bos="[BOS]", eos="[|endofturn|]", stored="files",
        cases=(
            Case(TALK, "[|system|]\nBe brief.[|endofturn|]\n[|user|]\nIs 1 < é?[|endofturn|]\n[|assistant|]\n"
                 "Yes.[|endofturn|]\n[|user|]\nWhy?[|endofturn|]\n[|assistant|]\n<think>\n\n</think>\n\n"),
            Case(ALONE, "[|user|]\nIs 1 < é?[|endofturn|]\n[|assistant|]\n<think>\n", _given(enable_thinking=True)),
        ),
    ),
    "ernie4_5": ChatFormat(
        "ernie4_5", ("<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>"), bos="<s>", eos="</s>",
        stored="files", more={"cls_token": "<|begin_of_sentence|>", "sep_token": "<|end_of_sentence|>"},
        cases=(
            Case(TALK, "<|begin_of_sentence|>Be brief.\nUser: Is 1 < é?\nAssistant: Yes.<|end_of_sentence|>User: Why?\n"
                 "Assistant: "),
        ),
    ),
    "hunyuan": ChatFormat(
        "hunyuan",
        ("<｜hy_begin▁of▁sentence｜>", "<｜hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>",
         "<｜hy_Assistant｜>", "<think>", "</think>"),
        bos="<｜hy_begin▁of▁sentence｜>", eos="<｜hy_place▁holder▁no▁2｜>", stored="files",
        cases=(
            Case(TALK, "<｜hy_begin▁of▁sentence｜>Be brief.<｜hy_place▁holder▁no▁3｜><｜hy_User｜>Is 1 < é?"
                 "<｜hy_Assistant｜>Yes.<｜hy_place▁holder▁no▁2｜><｜hy_User｜>Why?<｜hy_Assistant｜>"),
            Case(ALONE, "<｜hy_begin▁of▁sentence｜><｜hy_User｜>Is 1 < é?<｜hy_Assistant｜><think>\n\n</think>\n",
                 _given(enable_thinking=False)),
        ),
    ),
    "seed_oss": ChatFormat(
        "seed_oss", ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>"), bos="<seed:bos>", eos="<seed:eos>",
        stored="files",
        cases=(
            Case(TALK, "<seed:bos>system\nBe brief.<seed:eos><seed:bos>user\nIs 1 < é?<seed:eos><seed:bos>assistant\n"
                 "Yes.<seed:eos><seed:bos>user\nWhy?<seed:eos><seed:bos>assistant\n"),
            Case(ALONE, "<seed:bos>user\nIs 1 < é?<seed:eos><seed:bos>system\nYour thinking budget is 512.<seed:eos>"
                 "<seed:bos>assistant\n", _given(thinking_budget=512)),
            Case(ALONE, "<seed:bos>user\nIs 1 < é?<seed:eos><seed:bos>system\nYour thinking budget is 0.<seed:eos>"
                 "<seed:bos>assistant\n<seed:think></seed:think>", _given(thinking_budget=0)),
        ),
    ),
    "tulu": ChatFormat(
        "tulu", _TULU, bos="<|endoftext|>", eos="<|endoftext|>",
        cases=(
            Case(TALK, "<|endoftext|><|system|>\nBe brief.\n<|user|>\nIs 1 < é?\n<|assistant|>\nYes.<|endoftext|>\n"
                 "<|user|>\nWhy?\n<|assistant|>\n"),
            Case(TURNS[:2], "<|endoftext|><|user|>\nIs 1 < é?\n<|assistant|>\nYes.<|endoftext|>\n", _CLOSED),
        ),
    ),
    "gpt_oss": ChatFormat(
        "gpt_oss", ("<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        bos="<|startoftext|>", eos="<|return|>", stored="files",
        cases=(
            Case(TALK, "<|start|>system<|message|>You are ChatGPT.\nCurrent date: @(%Y-%m-%d)\n\nReasoning: medium\n\n"
                 "# Valid channels: analysis, commentary, final.<|end|><|start|>developer<|message|># Instructions\n\n"
                 "Be brief.<|end|><|start|>user<|message|>Is 1 < é?<|end|><|start|>assistant<|channel|>final<|message|>"
                 "Yes.<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant"),
            Case(_THOUGHT, "<|start|>system<|message|>You are ChatGPT.\nCurrent date: @(%Y-%m-%d)\n\nReasoning: high\n"
                 "\n# Valid channels: analysis, commentary, final.<|end|><|start|>user<|message|>Why?<|end|>"
                 "<|start|>assistant<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>final"
                 "<|message|>Yes.<|return|>", {**_CLOSED, **_given(reasoning_effort="high")}),
        ),
    ),
    "apertus": ChatFormat(
        "apertus",
        ("<s>", "<|system_start|>", "<|system_end|>", "<|developer_start|>", "<|developer_end|>", "<|user_start|>",
         "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
        bos="<s>", eos="<|assistant_end|>", stored="files",
        cases=(
            Case(TALK, "<s><|system_start|>Be brief.<|system_end|><|developer_start|>Deliberation: disabled\n"
                 "Tool Capabilities: disabled<|developer_end|><|user_start|>Is 1 < é?<|user_end|><|assistant_start|>"
                 "Yes.<|assistant_end|><|user_start|>Why?<|user_end|><|assistant_start|>"),
            Case(ALONE, "<s><|system_start|>You are Apertus.<|system_end|><|developer_start|>Deliberation: enabled\n"
                 "Tool Capabilities:\nlook<|developer_end|><|user_start|>Is 1 < é?<|user_end|><|assistant_start|>",
                 {**_TOOLS, **_given(enable_thinking=True)}),
        ),
        refused=(Refused([*ALONE, {"role": "tool", "content": "So"}], "no role tool"),),
    ),
    "glm4": ChatFormat(
        "glm4", ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"), eos="<|endoftext|>",
        stored="files",
        cases=(
            Case(TALK, "[gMASK]<sop><|system|>\nBe brief.<|user|>\nIs 1 < é?<|assistant|>\nYes.<|user|>\nWhy?"
                 "<|assistant|>"),
        ),
    ),
    "glm4_5": ChatFormat(
        "glm4_5", ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>",
                   "</think>", "/nothink"), eos="<|endoftext|>", stored="files",
        cases=(
            Case(TALK, "[gMASK]<sop><|system|>\nBe brief.<|user|>\nIs 1 < é?<|assistant|>\n<think></think>\nYes."
                 "<|user|>\nWhy?<|assistant|>"),
            Case(ALONE, "[gMASK]<sop><|user|>\nIs 1 < é?/nothink<|assistant|>\n<think></think>",
                 _given(enable_thinking=False)),
        ),
    ),
    "dots1": ChatFormat(
        "dots1", ("<|endoftext|>", "<|system|>", "<|endofsystem|>", "<|userprompt|>", "<|endofuserprompt|>",
                  "<|response|>", "<|endofresponse|>"), eos="<|endofresponse|>",
        cases=(Case(TALK[:3], "<|system|>Be brief.<|endofsystem|><|userprompt|>Is 1 < é?<|endofuserprompt|><|response|>"
                    "Yes.<|endofresponse|><|response|>"),),
    ),
    "chatglm3": ChatFormat(
        "chatglm3", ("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>", "</s>"), eos="</s>",
        cases=(
            Case(TALK, "[gMASK]sop<|system|>\n Be brief.<|user|>\n Is 1 < é?<|assistant|>\n Yes.<|user|>\n Why?"
                 "<|assistant|>"),
        ),
    ),
    "minicpm": ChatFormat(
        "minicpm", ("<s>", "</s>", "<用户>", "<AI>"), bos="<s>", eos="</s>",
        cases=(Case(TURNS, "<用户>Is 1 < é?<AI>Yes.<用户>Why?<AI>"), Case(TALK[:2], "Be brief.<用户>Is 1 < é?<AI>")),
    ),
    "falcon": ChatFormat(
        "falcon", ("<|endoftext|>",), eos="<|endoftext|>",
        cases=(Case(TALK, "System: Be brief.\n\nUser: Is 1 < é?\n\nAssistant: Yes.\n\nUser: Why?\n\nAssistant:"),),
    ),
    "starcoder2": ChatFormat(
        "starcoder2", ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>",
        cases=(
            Case(TURNS, "<|endoftext|>You write code.\n\n### Instruction\nIs 1 < é?\n\n### Response\nYes."
                 "<|endoftext|>\n\n### Instruction\nWhy?\n\n### Response\n"),
        ),
        refused=(Refused(TALK, "this model knows no system message"),),
    ),
    # Baichuan's own code writes the turns: what users give is a template for that.
    "baichuan": ChatFormat(
        "baichuan", ("<unk>", "<s>", "</s>", "<reserved_106>", "<reserved_107>"), bos="<s>", eos="</s>", stored=None,
        cases=(
            Case(TALK, "Be brief.<reserved_106>Is 1 < é?<reserved_107>Yes.<reserved_106>Why?<reserved_107>"),
        ),
    ),
}  # fmt: skip

FORMATS: dict[str, ChatFormat] = {**CHATML, **LLAMAS, **LATENTS, **OTHERS}
