"""Which tokens an answer's content is made of, as parsers hold text back, take tags out and drop what is none of it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from quire.platform.outputs.messages.message import ContentDelta
from quire.server.responses.token_texts import ContentTokens
from tests.platform.outputs.messages.reading import message_format, tools

CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ANSWERS = [
    "Yes.",
    "a <b> c < d </think",
    "<think>Hm.</think>\n\nYes.",
    "<think>Hm.</think>Yes, aaa. </think>",
    f"Look: {CALL}",
    f"<think>Hm.</think>\n{CALL}",
    f"<think>a</think>So {CALL}\nand {CALL} done <tool",
]


def told(text: str, cuts: list[int]) -> tuple[str, str, list[int]]:
    """(the content, the texts of the tokens that are told of, which these are) Each token is what is between cuts."""
    parser = message_format("hermes", "qwen3").parser(tools(), None)
    content, chosen, tokens = "", list[int](), ContentTokens()
    places = [0, *cuts, len(text)]
    parts = [text[first:last] for first, last in pairwise(places)] + [""]
    for place, part in enumerate(parts):
        ended = place == len(parts) - 1
        deltas = parser.feed(part) if part else []
        deltas = [*deltas, *parser.finish()] if ended else deltas
        content += "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        chosen += [one["place"] for one in tokens.of(part, [{"place": place}], deltas, ended)]
    return content, "".join(parts[place] for place in chosen), chosen


@pytest.mark.parametrize("text", ANSWERS)
def test_letters_that_are_told_of_are_the_content(text: str) -> None:
    content, letters, chosen = told(text, list(range(1, len(text))))
    assert chosen == sorted(set(chosen))
    if CALL in text:  # spaces around calls are nobody's
        letters, content = "".join(letters.split()), "".join(content.split())
    assert letters == content
    assert chosen[-1] == len(text)  # the end token


@pytest.mark.parametrize("text", ANSWERS)
def test_every_part_of_the_content_is_of_a_token_that_is_told_of(text: str) -> None:
    rng = random.Random(text)
    for _ in range(50):
        cuts = [rng.randint(1, min(5, len(text) - 1))]
        while cuts[-1] < len(text) - 6:
            cuts.append(cuts[-1] + rng.randint(1, 6))
        content, parts, chosen = told(text, cuts)
        assert chosen == sorted(set(chosen))
        rest = iter(parts)
        assert all(letter in rest for letter in "".join(content.split())), (cuts, content, parts)  # in this order
