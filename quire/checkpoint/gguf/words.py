"""How texts are cut into words before they become tokens, by what a GGUF file calls it (tokenizer.ggml.pre).

The patterns are those of the models' own tokenizer.json, which the name stands for. A name that is not here is refused:
a text cut otherwise becomes other tokens than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


def _words(numbers: str, signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Words with what stands before them, numbers, signs, and the ends of lines."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{signs}|{_LINES}"


def _cased(endings: str, numbers: str) -> str:
    return "|".join(f"{one}{endings}" for one in _CASED) + rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES,
)  # fmt: skip
# Letters that have a case, as DeepSeek's first tokenizer lists them: code points and ranges of these.
_CASED_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D
A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_LETTERS = "".join("-".join(chr(int(end, 16)) for end in one.split("-")) for one in _CASED_LETTERS.split())
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# A step beside patterns: each digit by itself; runs of digits; GPT-2's own words; runs of signs.
DIGITS, NUMBERS, GPT2, SIGNS = "digits", "numbers", "gpt2", "signs"


@dataclass(frozen=True)
class Words:
    """steps: patterns whose matches stand alone, or one of the four above, each within what the one before has left.
    composed: characters are composed first (NFC). ignores_merges: a word that is a token becomes it, whatever merges
    say. begins: texts begin with BOS unless the file says otherwise."""

    steps: Sequence[str]
    composed: bool = False
    ignores_merges: bool = False
    begins: bool = False


_AS_LLAMA3 = Words((_LLAMA3,), ignores_merges=True, begins=True)
_BY_DIGIT = Words((DIGITS, GPT2))
_AS_QWEN2 = Words((_QWEN2,), composed=True)
WORDS: Mapping[str, Words] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _AS_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words((_LLAMA3,))),
    "chatglm-bpe": Words((_LLAMA3,)),
    "glm4": Words((_LLAMA3,), ignores_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _AS_QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), Words((_QWEN2,))),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "jais", "trillion", "granite-docling"), Words((GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), Words((GPT2,), composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _BY_DIGIT),
    "command-r": Words((DIGITS, GPT2), composed=True),
    "falcon": Words((SIGNS, GPT2, NUMBERS, r"[0-9][0-9][0-9]")),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-llm": Words(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN,
            DIGITS,
        )
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, DIGITS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Words(_DEEPSEEK3)),
    "tekken": Words((_cased("", r"\p{N}"),), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Words((_cased(f"{_ENDINGS}?", r"\p{N}{1,3}"),))),
    "seed-coder": Words((_words(r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Words((r" ?[^(\s|[.,!?…。，、।۔،])]+",))),
    "viking": Words((r" ?[^(\s|[.,!?…。，、।۔،])]+", r"\p{N}")),
}


def splitter(words: Words) -> Any:
    """The pre-tokenizer, which ends in bytes."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    for step in words.steps:
        if step == DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif step == NUMBERS:
            steps.append(pre_tokenizers.Digits(individual_digits=False))
        elif step == SIGNS:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        elif step == GPT2:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(step), "isolated"))
    if GPT2 not in words.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
