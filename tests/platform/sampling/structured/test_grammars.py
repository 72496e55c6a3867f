"""Patterns, choices, grammars and structural tags as grammars."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestError
from quire.platform.sampling.structured.compilation import compile_constraint
from quire.platform.sampling.structured.params import StructuredOutputsParams

sys.path.insert(0, str(Path(__file__).parent))
from byte_tokenizer import TOKENIZER, Bytes, accepts
from random_schemas import random_text

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws  # with escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
CITY = {"type": "json_schema", "json_schema": SCHEMA}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def whole(format: Any) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": format}}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


XML = {
    "type": "xml_parameters",
    "key": ["<parameter=", ">"],
    "value": ["\n", "\n</parameter>"],
    "separator": "\n",
    "json_schema": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "c": {"type": ["string", "number"]},
            "d": {"enum": ["x", "y"]},
        },
        "required": ["a"],
    },
}
PYTHON = {
    "type": "pythonic_arguments",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b": {"type": "array"}, "c": {"type": "object"}},
        "required": ["a"],
    },
}
CALLED = tag('{"name": "f", "parameters": ', CITY, "}")
ANSWER = {"type": "object", "properties": {"answer": {}}, "required": ["answer"], "additionalProperties": False}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag("<t>", CITY, "</t>")]}
X = "<parameter={}>\n{}\n</parameter>"
SERVED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json in gbnf": ({"grammar": JSON}, ['{"a":[1,2.5,{"b":null}]}', '{ "a": "x\\n" }'], ["{", "[1]", '{"a":}']),
    "gbnf": (
        {"grammar": 'root ::= "SELECT " col ("," " "? col)* " FROM " [a-z]+\ncol ::= [a-z]+ | "*"'},
        ["SELECT a, b FROM t", "SELECT * FROM x"],
        ["SELECT FROM t"],
    ),
    "sums": (
        {"grammar": 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"'},
        ["1+2-(3+4)"],
        ["1+", "()"],
    ),
    "lark": ({"grammar": 'start: "a" b+\nb: /[0-9]/ | "(" b ")"  // "::="'}, ["a1(2)"], ["a"]),
    "choice": ({"choice": ["a", "ab", "b/c\n", "é\"'"]}, ["a", "ab", "b/c\n", "é\"'"], ["abc", ""]),
    "regex": ({"regex": r"(?i)\d{3}-[x-z]+|^$"}, ["123-xYz", ""], ["123-", "1123-x"]),
    "tag": (whole(tag("<a>", CITY, "</a>")), ['<a>{"city":"x", "n":1}</a>'], ["<a></a>"]),
    "special": (whole(tag("<tool>", CITY, "<tool>")), ['<tool>{"city":"x"}<tool>'], ['<tool>{"city":"x"}']),
    "reasoning": (
        whole(sequence(tag("<think>", {"type": "any_text"}, "</think>"), {"type": "regex", "pattern": r"\s*"}, CITY)),
        ['<think>hm </thin </think>\n{"city":""}', '<think></think>{"city":""}'],
        ['{"city":""}', "<think></think>x"],
    ),
    "a call or an answer": (
        whole({"type": "or", "elements": [CALLED, {"type": "json_schema", "json_schema": ANSWER}]}),
        ['{"name": "f", "parameters": {"city":"x"}}', '{"answer":"y"}'],
        ['{"name": "g"}', '{"city":"x"}'],
    ),
    "calls": (
        whole({"type": "tags_with_separator", "tags": [CALLED], "separator": ", ", "at_least_one": True}),
        ['{"name": "f", "parameters": {"city":"x"}}, {"name": "f", "parameters": {"city":"x"}}'],
        ["", '{"name": "f", "parameters": {"city":"x"}}, '],
    ),
    "python": (
        whole(tag("[f(", PYTHON, ")]")),
        ["[f(a=True)]", '[f(a=None, b=["x", 1], c={"k": False})]'],
        ["[f()]", "[f(a=true)]", "[f(b=[])]"],
    ),
    "xml": (
        whole(tag("<f>\n", XML, "\n</f>")),
        [
            "<f>\n" + X.format("a", 'he said "x"\nand <b>') + "\n" + X.format("b", "5") + "\n</f>",
            "<f>\n" + X.format("a", "") + "\n" + X.format("c", "abc") + "\n" + X.format("d", "y") + "\n</f>",
            "<f>\n" + X.format("a", "7") + "\n" + X.format("c", "1.5") + "\n</f>",
        ],
        [
            "<f>\n" + X.format("b", "5") + "\n</f>",
            "<f>\n" + X.format("a", "") + "\n" + X.format("c", "true") + "\n</f>",
            "<f>\n" + X.format("a", "") + "\n" + X.format("d", "z") + "\n</f>",
        ],
    ),
    "free text within": (
        whole({"type": "or", "elements": [TRIGGERED, {"type": "const_string", "value": "no"}]}),
        ["abc", 'abc<t>{"city":"x"}</t>d', "no"],
        ["a<t>d"],
    ),
    "a grammar within": (
        whole(sequence({"type": "const_string", "value": "A:"}, {"type": "grammar", "grammar": "root ::= [0-9]+"})),
        ["A:12"],
        ["A:"],
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_shape_takes_what_fits(name: str) -> None:
    shape, right, wrong = SERVED[name]
    grammar = compile_constraint(StructuredOutputsParams(**shape), Bytes()).grammar
    assert grammar is not None
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


def test_free_text_with_tags() -> None:
    structures = [
        {"begin": "<function=foo>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=bar>", "schema": {}, "end": "</function>"},
    ]
    old = {"type": "structural_tag", "structures": structures, "triggers": ["<function=", "<function=b"]}
    compiled = compile_constraint(StructuredOutputsParams(structural_tag=old, after="</think>"), Bytes())
    (trigger,) = compiled.triggers  # one that begins with the other adds nothing
    assert (compiled.grammar, compiled.after, compiled.stop_after_first) == (None, "</think>", False)
    assert trigger.text == "<function="
    assert accepts(trigger.grammar, 'foo>{"city":"x"}</function>') and accepts(trigger.grammar, "bar>[1]</function>")
    assert not accepts(trigger.grammar, "foo>{}</function>")


def test_tags_that_have_to_come_stand_before_free_text() -> None:
    format = sequence(tag("<a>", {"type": "any_text"}, "</a>"), {**TRIGGERED, "at_least_one": True})
    compiled = compile_constraint(StructuredOutputsParams(**whole(format)), Bytes())
    assert compiled.grammar is not None and len(compiled.triggers) == 1
    assert accepts(compiled.grammar, '<a>x</a><t>{"city":""}</t>') and not accepts(compiled.grammar, "<a>x</a>")
    alone = {**TRIGGERED, "at_least_one": True, "stop_after_first": True}
    compiled = compile_constraint(StructuredOutputsParams(**whole(alone)), Bytes())
    assert compiled.triggers == () and accepts(str(compiled.grammar), '<t>{"city":""}</t>')


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"grammar": 'root ::= "a" b'}, "line 1: there is no rule 'b'"),
    ({"grammar": '\nx ::= "a"'}, 'no rule "root"'),
    ({"grammar": '\nroot ::= ("a"'}, r"line 2: this '\(' is not closed"),
    ({"grammar": 'root ::= "a" @'}, "line 1: '@'"),
    ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "line 2: the rule 'root' is defined"),
    ({"grammar": 'root ::= root "a"'}, "never comes to an end"),
    ({"grammar": 'root ::= "a"{3,1}'}, "wrong way round"),
    ({"grammar": "root ::= " + "(" * 100 + '"a"' + ")" * 100}, "60 groups"),
    ({"grammar": 'start: "a" b'}, "unknown name"),
    ({"grammar": 'start: "a'}, "1.10.: lexer error"),
    ({"grammar": 'start[temperature=0.5]: "a"'}, "'temperature' is not served"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    ({"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'}, "5000 rules"),
    ({"grammar": "x" * 1_000_000}, "262,144"),
    ({"regex": "a(?=b)"}, "lookahead"),
    ({"regex": r"(a)\1"}, "back references"),
    ({"regex": r"\bfoo"}, "word boundaries"),
    ({"regex": "(^a)*"}, "anchors within a repetition"),
    ({"regex": "[z-a]"}, "no order"),
    ({"regex": "((a{1000}){1000}){1000}"}, "repetitions"),
    ({"regex": "(" * 200 + "a" + ")" * 200}, "100 groups"),
    ({"regex": "a$b"}, "no text matches"),
    ({"choice": []}, "of one at least"),
    ({"choice": [""]}, "not empty"),
    ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
    ({"structural_tag": "{"}, "no JSON"),
    (whole({"type": "x"}), "format.type"),
    (whole({"type": "tag", "begin": "a"}), "format.content.type"),
    (whole({**TRIGGERED, "triggers": ["<u>"]}), "begins with no trigger"),
    (whole({**TRIGGERED, "surplus": 1}), "'surplus' is not known"),
    (whole(sequence({"type": "any_text"}, CITY)), "any_text is served"),
    (whole(sequence(tag("<a>", {"type": "json_schema", "json_schema": {"frob": 1}}, ""))), "frob at #/frob"),
    (whole({**PYTHON, "json_schema": {"properties": {"a b": {}}, "required": ["a b"]}}), "'a b' cannot be written"),
]


@pytest.mark.parametrize(("shape", "said"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_enforced_is_refused(shape: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compile_constraint(StructuredOutputsParams(**shape), Bytes())


def test_formats_within_each_other_are_limited() -> None:
    format: Any = {"type": "any_text"}
    for _ in range(300):
        format = sequence(format)
    with pytest.raises(RequestError, match="32 formats"):
        compile_constraint(StructuredOutputsParams(**whole(format)), Bytes())


def test_long_lines_of_rules_do_not_end_the_process() -> None:
    lines = "\n".join(f'r{i} ::= "x" r{i + 1} | "y"' for i in range(2500))
    grammar = compile_constraint(
        StructuredOutputsParams(grammar=f'{lines}\nr2500 ::= "z"\nroot ::= r0'), Bytes()
    ).grammar
    assert accepts(str(grammar), "xxy") and not accepts(str(grammar), "xx")


PATTERNS = [
    "a", "^a", "^a$", "a|b", "^(a|b)$", "a*b", "^a|b$", r"\d+", r"^\w+$", r"\W", r"\s", "[^a]", "[a-c]{2,3}",
    "(a|^b)c?",
    "a{,2}b", ".", "^.*$", "^$", r"[\d-]", "(?i)AB", "(?:a)?b+?", r"\x61|\u0062", r'["\\]', "^/", "{", "a{2", "[]a]",
    r"[\n\t]", "x(?s:.)y", r"(a|b)*a(a|b){5}", r"(?P<n>a)", r"^\S+$", r"^\D$", "(a*)*b",
]  # fmt: skip
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "aab",
    "12",
    "é",
    "\n",
    '"',
    'a"b\\c',
    "/x/",
    "AB",
    "{",
    "a{2",
    "aaa",
    "]",
    "x\ny",
    "b",
    "-",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_as_pythons_own(pattern: str) -> None:
    grammar = str(compile_constraint(StructuredOutputsParams(regex=pattern), Bytes()).grammar)
    for text in TEXTS:
        known = text.isascii() or not re.search(r"\\[DWw]", pattern)  # dialects differ: what all mean is generated
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)) or not known, text
    for seed in range(5):
        made = random_text(TOKENIZER, grammar, seed, soft=20)
        assert made is not None and re.fullmatch(pattern, made)


def test_random_patterns() -> None:
    pick = random.Random(3)

    def made(depth: int) -> str:
        kind = pick.randrange(6 if depth else 3)
        if kind < 3:
            return pick.choice(["a", "b", "[a-d]", "[^a]", r"\d", ".", "x{2}", r"\.", "é"])
        if kind == 3:
            return made(depth - 1) + made(depth - 1)
        if kind == 4:
            return f"(?:{made(depth - 1)}|{made(depth - 1)})"
        return f"({made(depth - 1)}){pick.choice(['*', '+', '?', '{1,3}', '{2,}'])}"

    for seed in range(60):
        pattern = made(4)
        grammar = str(compile_constraint(StructuredOutputsParams(regex=pattern), Bytes()).grammar)
        text = random_text(TOKENIZER, grammar, seed, soft=20)
        assert text is None or re.fullmatch(pattern, text), pattern
