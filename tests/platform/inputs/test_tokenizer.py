"""The tokenizer of a checkpoint: loaded, its end tokens, and texts made ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, RequestError
from quire.platform.inputs.chat import render_chat
from quire.platform.inputs.tokenizer import encode_bad_words, encode_prompt, eos_token_ids, load_tokenizer
from tests.platform.inputs.test_chat import CHAT, tokenizer


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert encode_prompt(loaded, "Hello é") == encode_prompt(tokenizer(), "Hello é")
    assert render_chat(loaded, CHAT).token_ids == render_chat(tokenizer(), CHAT).token_ids


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value", ["8", [1], {"a": 1}])
def test_a_tokenizers_setting_of_a_wrong_type_is_found_at_load(tmp_path: Path, value: Any) -> None:
    tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": value}))
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, {1}),
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {1, 5}),
        ({"eos_token_id": [5, 7]}, None, {1, 5, 7}),
        ({}, {"eos_token_id": 6}, {1, 6}),
        (None, {"text_config": {"eos_token_id": [8]}}, {1, 8}),
    ],
)
def test_end_tokens(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path, tokenizer()) == expected
    assert eos_token_ids(tmp_path, None) == expected - {1}


def test_end_tokens_outside_the_vocabulary(tmp_path: Path, caplog: Any) -> None:
    """They can never be drawn; where there are no others, no answer ends of itself."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 300]}')
    assert eos_token_ids(tmp_path, None, 300) == {5}
    assert "[300]" in caplog.text and "no other is known" not in caplog.text
    assert eos_token_ids(tmp_path, None, 5) == frozenset()
    assert "ends at 4" in caplog.text and "no other is known" in caplog.text


@pytest.mark.parametrize(
    "content",
    ['{"eos_token_id": "2"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": 1099511627776}', '{"bos_token_id": -5}',
     '{"eos_token_id": 1, "eos_token_id": 2}', "{", "[]", "[" * 100000],
)  # fmt: skip
def test_end_tokens_that_make_no_sense(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path)


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    words = encode_bad_words(tokenizer(), ["the", "é"])
    assert {tokenizer().decode(word) for word in words} >= {"the", "é"}
    assert tuple(tokenizer().encode("the", add_special_tokens=False)) in words
    assert all(tokenizer().bos_token_id not in word for word in words)
    assert encode_bad_words(None, []) == ()
    with pytest.raises(RequestError, match="no tokenizer"):
        encode_bad_words(None, ["the"])
    with pytest.raises(RequestError, match=r"bad_words\[1\].*surrogate"):
        encode_bad_words(tokenizer(), ["the", "\ud800"])


def test_a_prompt_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        encode_prompt(tokenizer(), "a\ud800")
    with pytest.raises(RequestError, match="surrogate"):
        render_chat(tokenizer(), [{"role": "user", "content": "\udfff"}])
