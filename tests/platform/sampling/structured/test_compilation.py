"""From parameters to grammars."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from quire.demo import model_path
from quire.platform.sampling.structured.compilation import compile_constraint
from quire.platform.sampling.structured.params import StructuredOutputsParams
from quire.platform.sampling.structured.vocabulary import Vocabulary, vocabulary_source


class ByteTokenizer:
    """One token a byte, and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def special_tokens(self) -> dict[str, int]:
        return {"<eos>": 256}


TOKENIZER = LLTokenizer(TokenizerWrapper(ByteTokenizer()), slices=[])


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a":1}', "{}"),
        ({"json_object": True}, '{"x":[1]}', "[1]"),
        ({"regex": "a+b"}, "aab", "aabc"),
        ({"choice": ["yes", "no", "no way"]}, "no way", "yes way"),
    ],
)
def test_a_shape_takes_what_fits_and_nothing_else(shape, right, wrong):
    compiled = compile_constraint(StructuredOutputsParams(**shape, after="</think>"), ByteTokenizer())
    assert compiled.after == "</think>" and compiled.triggers == ()
    assert accepts(compiled.grammar, right)
    assert not accepts(compiled.grammar, wrong)


def test_the_byte_that_marks_special_tokens_is_none_of_them():
    """0xFF has a token in byte-level vocabularies, which llguidance takes for a special token without text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_path() / "tokenizer.json"))
    made = Vocabulary(vocabulary_source(tokenizer, len(tokenizer), frozenset([2])))
    marker = tokenizer.convert_tokens_to_ids("ÿ")
    assert made.special_tokens()["<tool_call>"] and "" not in made.special_tokens()
    assert not made.are_allowed([marker]) and not made.allowed[marker // 32] >> marker % 32 & 1
    content = {"type": "const_string", "value": "a"}
    tag = {"type": "tag", "begin": "<tool_call>", "content": content, "end": "</tool_call>"}
    shape = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag})
    matcher = LLMatcher(made.tokenizer, compile_constraint(shape, made).grammar)
    assert "".join(map(tokenizer.decode, matcher.compute_ff_tokens())) == "<tool_call>a</tool_call>"
