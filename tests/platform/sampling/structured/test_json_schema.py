"""JSON schemas as grammars: keyword by keyword, refusals, limits, and random ones before a validator."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.compiler import schema_grammar
from quire.platform.sampling.structured.json_schema.writer import Spacing

sys.path.insert(0, str(Path(__file__).parent))
from byte_tokenizer import TOKENIZER, accepts
from random_schemas import VALUES, Schemas, random_text

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
KINDS = [{"k": {"const": "x"}}, {"k": {"const": "y"}, "v": {"type": "number"}}]
SERVED: list[tuple[Any, list[str], list[str]]] = [
    (OBJECT, ['{"a":1}', '{"a": 1, "b": "x"}', '{"a":1,"c":null}'], ["{}", '{"b":"x"}', '{"a":1.5}', '{"a":1,"a":2}']),
    ({}, ["1", "{}", '[1,{"a":[]}]', '"\\u00e9\\ud83d\\ude00"'], ["x", '"\\ud800"', "01", "[1,]"]),
    (True, ["null"], ["nul"]),
    ({"enum": [1, "a", None, {"x": [1]}]}, ["1", '"a"', '{"x": [1]}'], ["2", '{"x":[1,1]}']),
    ({"const": 2.5}, ["2.5"], ["2", "2.50"]),
    ({"enum": ["ab", "b", 7], "maxLength": 1}, ['"b"', "7"], ['"ab"']),
    (
        {"oneOf": [{"type": "object", "properties": one, "required": list(one)} for one in KINDS]},
        ['{"k":"x"}', '{"k":"y","v":1.5}'],
        ['{"k":"y"}', '{"k":"z"}'],
    ),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "minimum": 0, "maximum": 9}, ["2", "3", "9"], ["0", "6", "1"]),
    ({"type": "array", "items": {"$ref": "#"}}, ["[]", "[[],[[]]]"], ["[1]"]),
    ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]}, ["[[],[[1]]]"], ['["x"]']),
    (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxContains": 2},
        ["[5]", "[1,5,6]"],
        ["[1]", "[5,6,7]"],
    ),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ["[]", "[3,2,1]"], ["[1,1]"]),
    (
        {"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "type": "array"},
        ["[1,2]"],
        ["[1]", "[2,2]"],
    ),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1,1]"]),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        ['{"a":1,"b":2}', '{"a":1,"b":2,"c":3}'],
        ['{"a":1}', "{}", '{"a":1,"a":2}'],
    ),
    (
        {
            "type": "object",
            "minProperties": 2,
            "patternProperties": {"^x": {"type": "null"}},
            "additionalProperties": {},
        },
        ['{"a":1,"x":null}'],
        ['{"a":1}', '{"a":1,"x":1}'],
    ),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ['{"b":1}', "{}"], ['{"a":1,"b":1}']),
    (
        {"type": "object", "patternProperties": {"^s": {"type": "string"}}, "additionalProperties": False},
        ['{"s":"a"}', "{}"],
        ['{"s":1}', '{"x":1}'],
    ),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"b":1}'], ['{"c":1}']),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"b":1}'], ['{"cc":1}']),
    (
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, **OBJECT},
        ['{"a":1,"b":""}', '{"a":2}'],
        ['{"a":1}'],
    ),
    ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["z"]}}, ['{"a":1,"z":1}'], ['{"a":1}']),
    ({"not": {"type": "object"}}, ["1", "[]"], ["{}"]),
    ({"type": "object", "not": {"required": ["a"]}}, ['{"b":1}'], ['{"a":1}']),
    ({"type": "object", "not": {"additionalProperties": {"type": "null"}}}, ['{"b":1}'], ['{"b":null}', "{}"]),
    ({"type": "array", "not": {"items": {"type": "null"}}}, ["[1]", "[null,1]"], ["[null]", "[]"]),
    (
        {
            "type": "object",
            "properties": {"a": {}},
            "unevaluatedProperties": False,
            "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"required": ["a"]}],
        },
        ['{"a":1}', '{"a":1,"b":2}', '{"b":1}'],
        ['{"b":1,"c":1}', '{"c":1}'],
    ),
    ({"type": "string", "pattern": "^a+$", "minLength": 2}, ['"aa"'], ['"a"', '"ab"', '"aa\\n"']),
    ({"type": "string", "allOf": [{"pattern": "a"}, {"not": {"pattern": "b"}}]}, ['"xa"'], ['"ab"', '"x"']),
    ({"type": "string", "pattern": '["\\\\/]'}, ['"\\""', '"/"', '"\\\\"'], ['"n"']),
    ({"type": ["integer", "null"], "minimum": 3, "exclusiveMaximum": 5}, ["3", "4", "null"], ["2", "5", "-3"]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, ["4"], ["3"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.3}, ["0.1", "0.3", "0.25"], ["0", "0.0", "0.31", "1e-1"]),
    ({"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1}, ["0.1", "1"], ["0.15", "0.3"]),  # 0.3 / 0.1 < 3
    ({"type": "integer", "multipleOf": 7}, ["14", "-7", "0"], ["15"]),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"$defs": {"é/~": {"$anchor": "x", "type": "null"}}, "$ref": "#x"}, ["null"], ["1"]),
    ({"$defs": {"é/~": {"type": "null"}}, "$ref": "#/$defs/%C3%A9~1~0"}, ["null"], ["1"]),
    ({"$id": "http://a/b", "$defs": {"c": {"$id": "c", "type": "null"}}, "$ref": "c"}, ["null"], ["1"]),
    ({"type": "object", "properties": {"__proto__": {"type": "null"}}}, ['{"__proto__":null}'], ['{"__proto__":1}']),
    ({"title": "t", "x-own": 1, "discriminator": {}, "type": "null", "default": 1}, ["null"], ["1"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), SERVED, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_takes_what_validates(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = schema_grammar(schema)
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "no value fits"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "no value fits"),
        ({"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^a+$"}}, "begin alike"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value fits"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no value fits"),
        ({"$ref": "#"}, r"\$ref at #/\$ref: it leads back to itself"),
        ({"not": {"$ref": "#"}}, "its own negation"),
        ({"properties": {"a/b": {"frob": 1}}}, "frob at #/properties/a~1b/frob: this keyword is not known"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, "uniqueItems at #/uniqueItems"),
        ({"pattern": "(?=a)"}, "pattern at #/pattern.*lookahead"),
        ({"$ref": "http://x.y/z"}, "not within the schema"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"type": "strin"}, "type at #/type"),
        ({"nullable": True}, "nullable at #/nullable"),
        ({"not": {"format": "date"}}, "format at #/not/format"),
        ({"format": "unheard-of"}, "format at #/format"),
        ('{"const":1e999}', "too large"),
        ('{"a":NaN}', "NaN"),
        ("{", "no JSON"),
        ([1], "an object or a bool"),
        # Attacks.
        ('{"type":"object","properties":{"a":' * 10_000 + "{}" + "}}" * 10_000, "128 levels"),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(10)]},
            "4,096 alternatives",
        ),
        ({"patternProperties": {f"^{i}": {"type": "null"} for i in range(10)}}, "6 patterns"),
        ({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}, "6 patterns"),
        ({"pattern": "(a{1000}){1000}"}, "repetitions"),
        ({"properties": {f"p{i}": {} for i in range(5000)}, "type": "object"}, "10,000 rules"),
        ({"oneOf": [{"const": i} for i in range(400)]}, "300 alternatives"),
        ({"minimum": 10**1000}, "400 digits"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_cannot_be_enforced_is_refused(schema: Any, said: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError, match=said):
        schema_grammar(schema)
    assert time.process_time() - started < 20  # it takes well below one


def test_long_lines_of_references_do_not_end_the_process() -> None:
    """llguidance follows them one deeper in its stack than the other."""
    named: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(700)
    }
    grammar = schema_grammar({"$defs": {**named, "d700": {"type": "null"}}, "$ref": "#/$defs/d0"})
    assert accepts(grammar, '{"a":{"a":{}}}') and not accepts(grammar, '{"a":null}')


@pytest.mark.slow
def test_an_enum_of_100000_is_served() -> None:
    grammar = schema_grammar({"enum": [f"value {i}" for i in range(100_000)]})
    assert accepts(grammar, '"value 99999"')


def test_space_between_tokens() -> None:
    text = '{ "a" : 1 }'
    assert not accepts(schema_grammar(OBJECT), text)
    assert accepts(schema_grammar(OBJECT, Spacing(pattern=r"[ \n]?")), text)
    compact = schema_grammar(OBJECT, Spacing(compact=True))
    assert accepts(compact, '{"a":1}') and not accepts(compact, '{"a": 1}')
    with pytest.raises(RequestError, match="whitespace_pattern"):
        schema_grammar(OBJECT, Spacing(pattern="x?"))


def test_objects_are_closed_where_they_are_to_be() -> None:
    closed = schema_grammar(
        {**OBJECT, "properties": {**OBJECT["properties"], "o": {"type": "object"}}}, close_objects=True
    )
    assert accepts(closed, '{"a":1,"o":{"x":1}}') and not accepts(closed, '{"a":1,"c":1}')
    assert accepts(schema_grammar({**OBJECT, "additionalProperties": True}, close_objects=True), '{"a":1,"c":1}')


def test_models_of_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")
    Point = pydantic.create_model("Point", x=(int, ...), label=(str | None, None))
    grammar = schema_grammar(Point)
    assert accepts(grammar, '{"x":1,"label":null}') and not accepts(grammar, '{"x":"1"}')


def orders(value: Any) -> Iterator[str]:
    """Texts of a value, with its properties in any order."""
    if isinstance(value, list):
        for parts in itertools.islice(itertools.product(*(list(orders(one))[:4] for one in value)), 24):
            yield f"[{','.join(parts)}]"
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            each = [
                [f"{json.dumps(name, ensure_ascii=False)}:{text}" for text in orders(value[name])] for name in names
            ]
            for parts in itertools.islice(itertools.product(*each), 4):
                yield f"{{{','.join(parts)}}}"
    else:
        yield json.dumps(value, ensure_ascii=False)


def check(seed: int) -> int:
    """Of a random schema: texts of its grammar validate, values that do not are not taken. Returns how many texts."""
    schema = Schemas(seed).schema()
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        grammar = schema_grammar(schema)
    except RequestError as error:
        if "no value fits" in str(error) and '"format"' not in json.dumps(schema):  # formats that the judge passes over
            assert not any(judge.is_valid(value) for value in VALUES), schema
        return 0
    texts = [text for draw in range(3) if (text := random_text(TOKENIZER, grammar, 10 * seed + draw)) is not None]
    for text in texts:
        judge.validate(json.loads(text))
    for value in VALUES:
        taken = any(accepts(grammar, text) for text in orders(value))
        assert not taken or judge.is_valid(value), (schema, value)
    return len(texts)


def test_random_schemas() -> None:
    assert sum(map(check, range(25))) > 25


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_2000_random_schemas(part: int) -> None:
    assert sum(map(check, range(1000 + 100 * part, 1100 + 100 * part))) > 100
