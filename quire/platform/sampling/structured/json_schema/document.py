"""A schema's text taken apart: its subschemas with their places, and what its references lead to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from quire.errors import RequestError

MAX_SCHEMA_LENGTH = 8_000_000  # characters of its JSON text
MAX_NESTING = 128  # objects and arrays within each other
MAX_POINTER_SHOWN = 120  # characters of a place that an error repeats

# Keywords whose value is a schema, a list of them, or a mapping to them.
ONE_SCHEMA = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


class Schema:
    """A subschema at its place. The same place is the same object, so that sets of them are compared at once."""

    __slots__ = ("base", "pointer", "value")

    def __init__(self, value: bool | dict[str, Any], pointer: str, base: str) -> None:
        self.value, self.pointer, self.base = value, pointer, base

    def __repr__(self) -> str:
        return f"Schema({self.pointer})"


TRUE, FALSE = Schema(True, "#", ""), Schema(False, "#", "")


def refuse(schema: Schema, keyword: str, why: str) -> RequestError:
    """A RequestError that names the keyword and its place."""
    pointer = schema.pointer + ("/" + _escaped(keyword) if keyword else "")
    if len(pointer) > MAX_POINTER_SHOWN:
        pointer = "..." + pointer[-MAX_POINTER_SHOWN:]
    return RequestError(f"json schema: {keyword or 'the schema'} at {pointer}: {why}")


def load(schema: Any) -> Any:
    """A schema given as a text, a mapping, a bool or a pydantic model's class, as plain JSON values of its own."""
    if isinstance(schema, type) or hasattr(schema, "model_json_schema"):
        if not hasattr(schema, "model_json_schema"):
            raise RequestError(f"json: {schema!r} is no pydantic model; give one, or a JSON schema.")
        schema = schema.model_json_schema()
    if not isinstance(schema, str):
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"json: a JSON schema is an object or a bool, not {type(schema).__name__}.")
        schema = _dumped(schema)
    if len(schema) > MAX_SCHEMA_LENGTH:
        raise RequestError(f"json schema: it has {len(schema):,} characters; the limit is {MAX_SCHEMA_LENGTH:,}.")
    try:
        value = json.loads(schema, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError(f"json schema: it is no JSON: {error}.") from None
    if not isinstance(value, dict | bool):
        raise RequestError(f"json: a JSON schema is an object or a bool, not {type(value).__name__}.")
    return value


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"json schema: it is no JSON: {error}.") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _finite(text: str) -> float:
    number = float(text)
    if abs(number) == float("inf"):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _too_deep() -> RequestError:
    return RequestError(
        f"json schema: objects and arrays are nested deeper than {MAX_NESTING} levels, the limit: use $defs and $ref."
    )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class Document:
    """All subschemas of a schema, and where its references lead."""

    def __init__(self, root: Any) -> None:
        self._schemas: dict[int, Schema] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, list[tuple[str, Any]]] = {}
        self._made: dict[tuple[int, str], Schema] = {}
        _check_depth(root)
        self._root = root
        self._walk(root)
        self.root = self.schema(root)

    def schema(self, value: Any, pointer: str = "#", base: str = "") -> Schema:
        """The subschema that this part of the document is."""
        if isinstance(value, bool):
            return TRUE if value else FALSE
        if not isinstance(value, dict):
            raise RequestError(f"json schema: {pointer} is a {type(value).__name__}; a schema is an object or a bool.")
        if id(value) not in self._schemas:
            self._schemas[id(value)] = Schema(value, pointer, base)
        return self._schemas[id(value)]

    def child(self, schema: Schema, *path: str | int) -> Schema:
        """A subschema by the keyword, and the name or number below it."""
        value: Any = schema.value
        for step in path:
            value = value[step]
        if isinstance(value, dict) and id(value) in self._schemas:
            return self._schemas[id(value)]
        pointer = "/".join([schema.pointer, *(_escaped(str(step)) for step in path)])
        return self.schema(value, pointer, schema.base)

    def made(self, schema: Schema, what: str, value: Any) -> Schema:
        """A schema that stands for what a keyword says; the same one each time it is asked for."""
        if isinstance(value, bool):
            return TRUE if value else FALSE
        return self._made.setdefault((id(schema), what), Schema(value, f"{schema.pointer}/{what}", schema.base))

    def _walk(self, root: Any) -> None:
        pending: list[tuple[Any, str, str]] = [(root, "#", "")]
        self._resources[""] = root
        while pending:
            value, pointer, base = pending.pop()
            if not isinstance(value, dict):
                continue
            base = self._named(value, base)
            self.schema(value, pointer, base)
            pending += [(one, f"{pointer}/{path}", base) for path, one in _subschemas(value)]

    def _named(self, value: dict[str, Any], base: str) -> str:
        """Registers its $id and anchors; returns the base of references within."""
        identity = value.get("$id", value.get("id") if value.get("$schema", "").__class__ is str else None)
        if isinstance(identity, str) and identity and not identity.startswith("#"):
            base = urldefrag(urljoin(base, identity))[0]
            self._resources.setdefault(base, value)
        elif isinstance(identity, str) and len(identity) > 1:
            self._anchors.setdefault((base, identity[1:]), value)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = value.get(keyword)
            if isinstance(name, str):
                self._anchors.setdefault((base, name), value)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append((base, value))
        return base

    def resolve(self, schema: Schema, keyword: str) -> Schema:
        """What a reference in this schema leads to. Raises RequestError for one that leads out of the document."""
        assert isinstance(schema.value, dict)
        ref = schema.value[keyword]
        if not isinstance(ref, str):
            raise refuse(schema, keyword, "it is a text.")
        if keyword == "$recursiveRef":
            return self._recursive(schema)
        found = self._found(schema, keyword, ref)
        if keyword == "$dynamicRef" and isinstance(found.value, dict):
            name = urldefrag(ref)[1]
            if found.value.get("$dynamicAnchor") == name and len(self._dynamic.get(name, ())) > 1:
                raise refuse(schema, keyword, f"several subschemas have the $dynamicAnchor {name!r}: use $ref.")
        return found

    def _recursive(self, schema: Schema) -> Schema:
        found = self._found(schema, "$recursiveRef", "#")
        if len(self._resources) > 2 and isinstance(found.value, dict) and found.value.get("$recursiveAnchor"):
            raise refuse(schema, "$recursiveRef", "it is served where the schema has one $id: use $ref.")
        return found

    def _found(self, schema: Schema, keyword: str, ref: str) -> Schema:
        try:
            uri, fragment = urldefrag(urljoin(schema.base, ref) if ref and not ref.startswith("#") else ref)
        except ValueError:
            raise refuse(schema, keyword, f"{ref!r} is no reference.") from None
        uri = schema.base if ref.startswith("#") or not ref else uri
        if uri not in self._resources:
            raise refuse(schema, keyword, f"{ref!r} is not within the schema: put what it means into $defs.")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (uri, fragment) not in self._anchors:
                raise refuse(schema, keyword, f"no subschema has the $anchor {fragment!r}.")
            return self.schema(self._anchors[uri, fragment])
        return self._pointed(schema, keyword, uri, fragment)

    def _pointed(self, schema: Schema, keyword: str, uri: str, fragment: str) -> Schema:
        value: Any = self._resources[uri]
        base = uri
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isascii() and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                raise refuse(schema, keyword, f"{schema.value[keyword]!r} leads nowhere: there is no {name!r}.")  # type: ignore[index]
            if isinstance(value, dict) and id(value) in self._schemas:
                base = self._schemas[id(value)].base
        return self.schema(value, "#" + fragment, base)


def _subschemas(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in ONE_SCHEMA:
        if isinstance(value.get(keyword), dict):
            yield keyword, value[keyword]
    for keyword in SCHEMA_LISTS:
        if isinstance(value.get(keyword), list):
            yield from ((f"{keyword}/{place}", one) for place, one in enumerate(value[keyword]))
    for keyword in SCHEMA_MAPS:
        if isinstance(value.get(keyword), dict):
            yield from ((f"{keyword}/{_escaped(name)}", one) for name, one in value[keyword].items())


def _check_depth(root: Any) -> None:
    level = [root]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _too_deep()
