"""Random JSON schemas over all keywords of draft 2020-12, and random texts of a grammar."""

from __future__ import annotations

import random
from typing import Any

from llguidance import LLMatcher, LLTokenizer

NAMES = ["a", "b", "c", "long name", "é", 'q"\\']
PATTERNS = ["^a", "b$", "^[a-c]*$", "x|y", r"\d", "^.{0,3}$", r"^\w+$", "a.c", r"^(ab|c)+$", "[^a]", r"^\S+\s?\S*$"]
FORMATS = ["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration", "json-pointer"]
VALUES = [None, True, False, 0, 1, -3, 2.5, 10, "a", "", "ab", "x\n", [], [1], ["a", None], {}, {"a": 1}, {"b": [2]}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class Schemas:
    """One source of random schemas."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self) -> Any:
        """A schema, now and then with definitions that it refers to."""
        self.named = 0
        if self.random.random() < 0.2:
            self.named = self.random.choice([1, 2])
        found = self.inner(3)
        if self.named and isinstance(found, dict):
            found["$defs"] = {f"d{place}": self.inner(2) for place in range(self.named)}
        return found

    def inner(self, depth: int) -> Any:
        """A subschema."""
        chance = self.random.random()
        if chance < 0.04:
            return self.random.random() < 0.8
        if self.named and chance < 0.15:
            return {"$ref": f"#/$defs/d{self.random.randrange(self.named)}"}
        said: dict[str, Any] = {}
        if depth and self.random.random() < 0.3:
            self.applicators(said, depth - 1)
        if self.random.random() < 0.1:
            said["enum" if self.random.random() < 0.7 else "const"] = None
            said = {key: self.values() if key == "enum" else value for key, value in said.items()}
            if "const" in said:
                said["const"] = self.random.choice(VALUES)
        kinds = self.random.sample(TYPES, self.random.choice([1, 1, 1, 2]))
        if self.random.random() < 0.85:
            said["type"] = kinds[0] if len(kinds) == 1 else kinds
        for kind in kinds:
            if self.random.random() < 0.75:
                getattr(self, {"integer": "number"}.get(kind, kind), lambda said, depth: None)(said, depth)
        keys = list(said)
        self.random.shuffle(keys)
        return {key: said[key] for key in keys}

    def values(self) -> list[Any]:
        return self.random.sample(VALUES, self.random.randint(1, 6))

    def applicators(self, said: dict[str, Any], depth: int) -> None:
        for keyword in self.random.sample(["allOf", "anyOf", "oneOf", "not", "if"], self.random.choice([1, 1, 2])):
            if keyword == "not":
                said["not"] = self.inner(min(depth, 1))
            elif keyword == "if":
                said["if"] = self.inner(min(depth, 1))
                for branch in ("then", "else"):
                    if self.random.random() < 0.7:
                        said[branch] = self.inner(depth)
            else:
                said[keyword] = [self.inner(depth) for _ in range(self.random.randint(1, 3))]

    def number(self, said: dict[str, Any], depth: int) -> None:
        pick = self.random
        if pick.random() < 0.5:
            said[pick.choice(["minimum", "exclusiveMinimum"])] = pick.choice([0, -5, 3, 0.5, -1.25, 100])
        if pick.random() < 0.5:
            said[pick.choice(["maximum", "exclusiveMaximum"])] = pick.choice([7, 20, 3.5, 1000, 0, 10.25])
        if pick.random() < 0.25:
            said["multipleOf"] = pick.choice([1, 2, 3, 0.5, 0.1, 7, 10, 0.01])

    def string(self, said: dict[str, Any], depth: int) -> None:
        pick = self.random
        if pick.random() < 0.4:
            said["minLength"] = pick.randint(0, 4)
        if pick.random() < 0.4:
            said["maxLength"] = pick.randint(1, 9)
        if pick.random() < 0.35:
            said["pattern"] = pick.choice(PATTERNS)
        if pick.random() < 0.2:
            said["format"] = pick.choice(FORMATS)

    def array(self, said: dict[str, Any], depth: int) -> None:
        pick, below = self.random, max(depth - 1, 0)
        if pick.random() < 0.3:
            said["prefixItems"] = [self.inner(below) for _ in range(pick.randint(1, 3))]
        if pick.random() < 0.7:
            said["items"] = self.inner(below)
        elif pick.random() < 0.2:
            said["unevaluatedItems"] = self.inner(0)
        if pick.random() < 0.3:
            said["minItems"] = pick.randint(0, 3)
        if pick.random() < 0.4:
            said["maxItems"] = pick.randint(1, 5)
        if pick.random() < 0.2:
            said["contains"] = self.inner(min(below, 1))
            if pick.random() < 0.5:
                said["minContains"] = pick.randint(0, 2)
            if pick.random() < 0.5:
                said["maxContains"] = pick.randint(1, 3)
        if pick.random() < 0.1:
            said["uniqueItems"] = True

    def object(self, said: dict[str, Any], depth: int) -> None:
        pick, below = self.random, max(depth - 1, 0)
        if pick.random() < 0.8:
            said["properties"] = {name: self.inner(below) for name in pick.sample(NAMES, pick.randint(0, 4))}
        if pick.random() < 0.5:
            said["required"] = pick.sample(NAMES, pick.randint(0, 3))
        if pick.random() < 0.2:
            said["patternProperties"] = {one: self.inner(below) for one in pick.sample(PATTERNS, pick.randint(1, 2))}
        if pick.random() < 0.5:
            said["additionalProperties"] = self.inner(below) if pick.random() < 0.5 else False
        elif pick.random() < 0.2:
            said["unevaluatedProperties"] = self.inner(0)
        if pick.random() < 0.12:
            said["propertyNames"] = self.inner(0)
        if pick.random() < 0.15:
            said["minProperties"] = pick.randint(0, 3)
        if pick.random() < 0.15:
            said["maxProperties"] = pick.randint(1, 4)
        if pick.random() < 0.1:
            said["dependentRequired"] = {pick.choice(NAMES): pick.sample(NAMES, 1)}
        if pick.random() < 0.1:
            said["dependentSchemas"] = {pick.choice(NAMES): self.inner(min(below, 1))}


def random_text(tokenizer: LLTokenizer, grammar: str, seed: int, *, soft: int = 120, hard: int = 3000) -> str | None:
    """A text of a grammar, token by token at random; None where none has come to an end within `hard` tokens.

    From `soft` tokens on it hurries to the end. Raises AssertionError where the grammar leads nowhere.
    """
    pick = random.Random(seed)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = b""
    for count in range(hard):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [one for one in range(tokenizer.vocab_size) if mask >> one & 1 and one not in tokenizer.eos_tokens]
        accepting = matcher.is_accepting()
        if accepting and (not allowed or pick.random() < (0.2 if count < soft else 0.9)):
            return text.decode()
        assert allowed, f"nothing may follow {text!r}"
        if count >= soft or pick.random() < 0.35:
            near = [one for one in allowed if tokenizer.decode_bytes([one])[:1] in (b'"', b"]", b"}")]
            near = near or [
                one for one in allowed if tokenizer.decode_bytes([one])[:1] in (b":", b",", b"0", b"n", b"t")
            ]
            allowed = near or allowed
        token = pick.choice(allowed)
        assert matcher.consume_token(token), matcher.get_error()
        text += tokenizer.decode_bytes([token])
    return None
