"""A dozen schemas of the kind that applications send, each with an answer."""

from __future__ import annotations

from typing import Any

TEXT, NUMBER, WHOLE, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))


def record(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with these properties, all of them required, and no others."""
    return {
        "type": "object",
        "properties": required,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def many(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


NODE = {
    "id": "root",
    "children": [{"id": "left", "children": []}, {"id": "right", "children": [{"id": "leaf", "children": []}]}],
}

SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "steps of a calculation": (
        record({"steps": many(record({"explanation": TEXT, "output": TEXT})), "final_answer": TEXT}),
        {
            "steps": [
                {"explanation": "Take seven from both sides of the equation.", "output": "8x = -30"},
                {"explanation": "Divide both sides by eight.", "output": "x = -30 / 8"},
            ],
            "final_answer": "x = -3.75",
        },
    ),
    "a calendar's event": (
        record({"name": TEXT, "date": {"type": "string", "format": "date"}, "participants": many(TEXT)}),
        {"name": "Science fair", "date": "2026-05-22", "participants": ["Alice", "Bob", "Carol"]},
    ),
    "a tree of widgets": (
        {
            "$ref": "#/$defs/widget",
            "$defs": {
                "widget": record(
                    {
                        "type": {"enum": ["div", "button", "header", "section", "field", "form"]},
                        "label": TEXT,
                        "children": many({"$ref": "#/$defs/widget"}),
                        "attributes": many(record({"name": TEXT, "value": TEXT})),
                    }
                )
            },
        },
        {
            "type": "form",
            "label": "Sign in",
            "children": [
                {"type": "field", "label": "Name", "children": [], "attributes": [{"name": "id", "value": "user"}]},
                {"type": "button", "label": "Go", "children": [], "attributes": []},
            ],
            "attributes": [],
        },
    ),
    "a moderated text": (
        record(
            {
                "is_violating": FLAG,
                "category": {"anyOf": [{"enum": ["violence", "sexual", "self_harm"]}, {"type": "null"}]},
                "explanation": {"anyOf": [TEXT, {"type": "null"}]},
            }
        ),
        {"is_violating": False, "category": None, "explanation": None},
    ),
    "a paper": (
        record({"title": TEXT, "authors": many(TEXT), "abstract": TEXT, "keywords": many(TEXT)}),
        {
            "title": "Paging the cache of a language model",
            "authors": ["A. Reader", "B. Writer"],
            "abstract": "Memory is taken in blocks, and shared where beginnings are the same.",
            "keywords": ["memory", "serving"],
        },
    ),
    "a tree of nodes": (
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": record({"id": TEXT, "children": many({"$ref": "#/$defs/node"})})},
        },
        NODE,
    ),
    "an invoice": (
        record(
            {
                "number": {"type": "string", "pattern": "^INV-[0-9]{4,8}$"},
                "currency": {"enum": ["EUR", "USD", "GBP"]},
                "lines": many(record({"description": TEXT, "quantity": WHOLE, "price": NUMBER})),
                "total": NUMBER,
            }
        ),
        {
            "number": "INV-20417",
            "currency": "EUR",
            "lines": [{"description": "Paper, white", "quantity": 12, "price": 4.75}],
            "total": 57.0,
        },
    ),
    "a search": (
        record(
            {
                "query": TEXT,
                "filters": record(
                    {
                        "since": {"type": "string", "format": "date"},
                        "language": {"enum": ["en", "de", "fr", "ja"]},
                        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                    }
                ),
            }
        ),
        {"query": "how blocks are shared", "filters": {"since": "2025-01-01", "language": "en", "limit": 20}},
    ),
    "a person's contact": (
        record(
            {
                "name": TEXT,
                "email": {"type": "string", "format": "email"},
                "address": record({"street": TEXT, "city": TEXT, "postcode": {"type": "string", "maxLength": 10}}),
                "newsletter": FLAG,
            }
        ),
        {
            "name": "Grace Example",
            "email": "grace@example.org",
            "address": {"street": "1 Long Lane", "city": "Springfield", "postcode": "12345"},
            "newsletter": True,
        },
    ),
    "a recipe": (
        record(
            {
                "name": TEXT,
                "servings": WHOLE,
                "ingredients": many(record({"name": TEXT, "amount": NUMBER, "unit": {"enum": ["g", "ml", "piece"]}})),
                "instructions": many(TEXT, minItems=1),
            }
        ),
        {
            "name": "Pancakes",
            "servings": 4,
            "ingredients": [
                {"name": "flour", "amount": 250, "unit": "g"},
                {"name": "egg", "amount": 2, "unit": "piece"},
            ],
            "instructions": ["Mix everything.", "Fry on both sides until brown."],
        },
    ),
    "one of several actions": (
        record(
            {
                "action": {
                    "anyOf": [
                        record({"kind": {"const": "move"}, "x": NUMBER, "y": NUMBER}),
                        record({"kind": {"const": "say"}, "text": TEXT}),
                        record({"kind": {"const": "wait"}, "seconds": {"type": "integer", "minimum": 0}}),
                    ]
                },
                "reason": TEXT,
            }
        ),
        {"action": {"kind": "say", "text": "Hello there."}, "reason": "Somebody has come in."},
    ),
    "entities of a text": (
        record({"attributes": many(TEXT), "colors": many(TEXT), "animals": many(TEXT)}),
        {"attributes": ["quick", "lazy"], "colors": ["brown"], "animals": ["fox", "dog"]},
    ),
}
