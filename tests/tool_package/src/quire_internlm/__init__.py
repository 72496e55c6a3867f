"""InternLM 2's calls of tools, and those of a model that writes `CALL name {...}` and thinks between <aloud> tags."""

from dataclasses import dataclass

from quire.platform.outputs.messages import Literals, ReasoningFormat, TaggedJson, ToolFormat, read_arguments, tag

INTERNLM = TaggedJson(
    name="internlm",
    families="InternLM 2 and 2.5",
    begins=("<|action_start|><|plugin|>",),
    ends=("<|action_end|>",),
    marks=("<|action_start|>", "<|plugin|>"),
    arguments="parameters",
)


@dataclass(frozen=True, kw_only=True)
class Lines(ToolFormat):
    """CALL name {"argument": 1}"""

    def read_calls(self, reader, begun, tools):
        yield from reader.skip_spaces()
        name, _ = yield from reader.name_until(Literals([" "]))
        yield from read_arguments(reader, name)

    def call(self, function, schema):
        return tag(f"CALL {function.name} ", schema, "")


LINES = Lines(name="lines", begins=("CALL ",))
ALOUD = ReasoningFormat(name="aloud", begins=("<aloud>",), ends=("</aloud>",))
