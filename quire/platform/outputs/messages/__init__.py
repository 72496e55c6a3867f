"""What an answer's text says as a message: reasoning, content, calls of tools.

Here is what a package that brings a format of tool calls, or of reasoning, needs: see docs/tool-calling.md.
"""

from quire.platform.outputs.messages.json_formats import BareJson, ListedJson, TaggedJson
from quire.platform.outputs.messages.json_text import read_arguments, read_call, read_list
from quire.platform.outputs.messages.named_formats import NamedJson
from quire.platform.outputs.messages.pythonic_formats import PythonicFormat
from quire.platform.outputs.messages.reasoning_formats import ReasoningFormat
from quire.platform.outputs.messages.text_reader import Literals, Malformed, Reading, TextReader
from quire.platform.outputs.messages.tool_choice import Function, Tools
from quire.platform.outputs.messages.tool_format import Structure, ToolFormat, read_end, tag
from quire.platform.outputs.messages.xml_formats import XmlFormat

__all__ = [
    "BareJson",
    "Function",
    "ListedJson",
    "Literals",
    "Malformed",
    "NamedJson",
    "PythonicFormat",
    "Reading",
    "ReasoningFormat",
    "Structure",
    "TaggedJson",
    "TextReader",
    "ToolFormat",
    "Tools",
    "XmlFormat",
    "read_arguments",
    "read_call",
    "read_end",
    "read_list",
    "tag",
]
