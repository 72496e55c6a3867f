"""The formats of tool calls that quire knows."""

from __future__ import annotations

from quire.platform.outputs.messages.harmony import HARMONY_CALLS
from quire.platform.outputs.messages.json_formats import BareJson, ListedJson, TaggedJson
from quire.platform.outputs.messages.named_formats import MistralList, MistralNamed, NamedJson
from quire.platform.outputs.messages.pythonic_formats import PythonicFormat
from quire.platform.outputs.messages.tool_format import ToolFormat
from quire.platform.outputs.messages.xml_formats import XmlFormat

# Calls that are asked for, where a model has no notation of its own that is known: they are shaped, whatever it is.
PLAIN = BareJson(name="json", aliases=("plain_json",), families="any model that is told to", listed=True)

_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")

# Of several with one name the first is taken, if the chat template has the signs of none or of all.
FORMATS: tuple[ToolFormat, ...] = (
    TaggedJson(
        name="hermes",
        aliases=("qwen2_5", "qwen3", "granite4"),
        families="Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, Granite 4",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        signs=(("<tool_call>", "</tool_call>", '"name"', '"arguments"'),),
        unlike=("<arg_key>", "<function=", "<|tool_call|>"),
    ),
    XmlFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml",),
        families="Qwen3-Coder",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        function=("<function=", ">", "</function>"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        lines=True,
        signs=(("<tool_call>", "<function=", "<parameter=", "</parameter>"),),
        unlike=("<seed:tool_call>",),
    ),
    XmlFormat(
        name="glm45",
        aliases=("glm4_moe",),
        families="GLM-4.5, GLM-4.6",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        signs=(("<tool_call>{function-name}\n<arg_key>",),),
    ),
    XmlFormat(
        name="glm47",
        families="GLM-4.7",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        between="",
        signs=(("<tool_call>{function-name}<arg_key>",),),
    ),
    BareJson(
        name="llama3_json",
        aliases=("llama4_json",),
        families="Llama 3.1, 3.2 and 3.3; Llama 4 with its own template",
        begins=("<|python_tag|>",),
        arguments="parameters",
        signs=(('{"name": function name, "parameters": dictionary of argument name and its value}',),),
    ),
    PythonicFormat(
        name="llama4_pythonic",
        families="Llama 4",
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        signs=(("<|header_start|>", "[func_name1(param1=value1, param2=value2), func_name2(...)]"),),
    ),
    PythonicFormat(
        name="pythonic",
        families="Llama 3.2, ToolACE",
        signs=(
            (
                "<|start_header_id|>",
                "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
            ),
        ),
    ),
    MistralList(
        name="mistral",
        families="Mistral 7B v0.3, Nemo, Small, Large 2407 and the like",
        begins=("[TOOL_CALLS]",),
        space=" ",
        signs=(("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),),
        unlike=("[ARGS]",),
        short_ids=True,
    ),
    MistralNamed(
        name="mistral_named",
        aliases=("mistral",),
        families="Mistral Small 3.2, Magistral, Devstral of 2025 and later",
        begins=("[TOOL_CALLS]",),
        marks=("[ARGS]", "[CALL_ID]"),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        unlike=("[CALL_ID]",),
        short_ids=True,
    ),
    MistralNamed(
        name="mistral_identified",
        aliases=("mistral",),
        families="the same, where the template writes ids",
        begins=("[TOOL_CALLS]",),
        marks=("[ARGS]", "[CALL_ID]"),
        identified=True,
        signs=(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),),
        short_ids=True,
    ),
    ListedJson(
        name="granite",
        families="Granite 3.0 to 3.3",
        begins=("<|tool_call|>", "<tool_call>"),
        signs=(("<|tool_call|>", "<|start_of_role|>"),),
    ),
    NamedJson(
        name="deepseek_v3",
        families="DeepSeek-V3 and R1",
        begins=_DEEPSEEK[0],
        ends=_DEEPSEEK[1],
        marks=_DEEPSEEK_CALL,
        opens_call="<｜tool▁call▁begin｜>",
        before="function<｜tool▁sep｜>",
        separates="\n",
        fence=("```json\n", "\n```"),
        closes_call="<｜tool▁call▁end｜>",
        between="\n",
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),),
    ),
    NamedJson(
        name="deepseek_v31",
        families="DeepSeek-V3.1",
        begins=_DEEPSEEK[0],
        ends=_DEEPSEEK[1],
        marks=_DEEPSEEK_CALL,
        opens_call="<｜tool▁call▁begin｜>",
        separates="<｜tool▁sep｜>",
        closes_call="<｜tool▁call▁end｜>",
        signs=(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),),
        unlike=("```json",),
    ),
    NamedJson(
        name="kimi_k2",
        families="Kimi K2",
        begins=("<|tool_calls_section_begin|>",),
        ends=("<|tool_calls_section_end|>",),
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        opens_call="<|tool_call_begin|>",
        before="functions.",
        behind=r":[0-9]+",
        separates="<|tool_call_argument_begin|>",
        closes_call="<|tool_call_end|>",
        signs=(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),),
    ),
    ListedJson(
        name="phi4_mini_json",
        families="Phi-4-mini with vLLM's template",
        begins=("functools", "<|tool_call|>"),
        signs=(("functools[",),),
    ),
    ListedJson(
        name="phi4_mini",
        aliases=("phi4_mini_json",),
        families="Phi-4-mini",
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        signs=(("<|tool|>", "<|/tool|>"),),
        unlike=("functools[",),
    ),
    HARMONY_CALLS,
    PLAIN,
)
