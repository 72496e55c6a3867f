"""A tokenizer read without transformers: it answers all that quire asks as transformers' does, or is transformers'."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quire import LLM
from quire.checkpoint import smollm2
from quire.demo import model_path
from quire.platform.inputs.plain_tokenizer import PlainTokenizer, full_tokenizer, read_plain_tokenizer
from quire.platform.inputs.tokenizer import encode_rendered, learn_words, load_tokenizer
from quire.platform.sampling.structured.vocabulary import vocabulary_source

WORDS = ["The red circle rolls to the blue square.", "Once upon a time a star met a triangle, and they sang: la la."]
SPECIAL = ["<unk>", "<s>", "</s>", "<tool>"]
TEXTS = [
    "", " ", "\n", "Hello", " Hello", "Hello ", "  two  spaces ", "tab\tand\r\nline", "don't , stop . I 'm",
    "é e\u0301 Å",
    "naïve ﬁ ①", "你好，世界", "مرحبا", "🙂👨‍👩‍👧", "\u200b\ufeff\u00a0x", "\x00\x01", "1234567890", "a" * 300,
    "<s>", "x<s>y", " <s> ", "</s></s>", "<unk>", "<tool>call", "<|im_start|>user\nHi<|im_end|>\n", "<|bos|><|image|>",
    "<s", "▁x", "<0x0A>", "Ġ", "\ud7ff\ue000\U0010ffff",
]  # fmt: skip


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(WORDS, trainer)
    return made


def with_bos() -> Tokenizer:
    made = byte_level()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(WORDS, trainer)
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(WORDS, trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL))
    return made


def with_odd_tokens() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("maybe", single_word=True), AddedToken("strip", lstrip=True, rstrip=True)])
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
MADE = {
    one.__name__: one for one in (byte_level, with_bos, metaspace, word_piece, with_odd_tokens)
}  # fmt: skip


def save(make: Callable[[], Tokenizer], folder: Path, **settings: Any) -> Path:
    """As transformers saves it, beside a Llama's config.json."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    PreTrainedTokenizerFast(tokenizer_object=make(), **named).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def save_class(name: str, folder: Path) -> Path:
    """A tokenizer that transformers builds anew: GPT-2's has its end in its vocabulary, Qwen's behind it."""
    made = byte_level()
    state = json.loads(made.to_str())["model"]
    vocabulary = {token: number for token, number in state["vocab"].items() if token not in SPECIAL}
    vocabulary = {token: place for place, token in enumerate(vocabulary)}
    if name == "GPT2Tokenizer":
        vocabulary["<|endoftext|>"] = len(vocabulary)
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = getattr(transformers, name)(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save_pretrained(folder)
    kind = {"GPT2Tokenizer": "gpt2", "Qwen2Tokenizer": "qwen3"}[name]
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


@pytest.fixture(scope="module", params=[*MADE, "GPT2Tokenizer", "Qwen2Tokenizer", "bundled", "smollm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bundled":
        return model_path()
    if request.param == "smollm2":
        return smollm2.checkpoint_folder()
    if request.param not in MADE:
        return save_class(request.param, tmp_path_factory.mktemp("class"))
    return save(MADE[request.param], tmp_path_factory.mktemp("made"))


def both(folder: Path) -> tuple[PlainTokenizer, Any]:
    plain = load_tokenizer(folder)
    assert isinstance(plain, PlainTokenizer) and plain._full is None  # it has asked transformers for nothing yet
    return plain, AutoTokenizer.from_pretrained(folder)


def test_texts_become_the_same_tokens_and_back(folder: Path) -> None:
    plain, real = both(folder)
    for text in [*TEXTS, *(f"{a} {b}" for a in TEXTS[:8] for b in TEXTS[16:])]:
        for special in (True, False):
            ids = real.encode(text, add_special_tokens=special, verbose=False)
            assert plain.encode(text, add_special_tokens=special, verbose=False) == ids
            for skip in (True, False):
                assert plain.decode(ids, skip_special_tokens=skip) == real.decode(ids, skip_special_tokens=skip)
            whole = plain.decode(ids, clean_up_tokenization_spaces=False)
            assert whole == real.decode(ids, clean_up_tokenization_spaces=False)
        assert plain.convert_tokens_to_ids(text) == real.convert_tokens_to_ids(text)
    assert plain._full is None


def test_other_threads_run_while_a_text_becomes_tokens(folder: Path) -> None:
    plain, _ = both(folder)
    text, before = WORDS[0] * 100, sys.getswitchinterval()
    asked, ran = threading.Event(), threading.Event()

    def other() -> None:
        asked.wait()
        ran.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    sys.setswitchinterval(600)  # nobody is let run but by who waits, or does without Python
    try:
        asked.set()
        for _ in range(300):
            plain.encode(text)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_every_token_is_the_same(folder: Path) -> None:
    plain, real = both(folder)
    assert len(plain) == len(real) and plain.get_vocab() == real.get_vocab()
    for token_id in range(min(len(real), 2000) + 3):
        assert plain.convert_ids_to_tokens(token_id) == real.convert_ids_to_tokens(token_id)
        if token_id < len(real):
            assert plain.decode(token_id) == real.decode(token_id) == plain.decode([token_id])
    ids = list(range(0, len(real), 7))
    for skip in (True, False):
        assert plain.convert_ids_to_tokens(ids, skip) == real.convert_ids_to_tokens(ids, skip)
    tokens = [*real.all_special_tokens, "no such token"]
    assert plain.convert_tokens_to_ids(tokens) == real.convert_tokens_to_ids(tokens)


def test_what_it_says_of_itself_is_the_same(folder: Path) -> None:
    plain, real = both(folder)
    for name in (
        "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "bos_token_id",
        "eos_token_id", "unk_token_id", "pad_token_id", "mask_token_id", "all_special_tokens", "all_special_ids",
        "special_tokens_map", "chat_template", "model_input_names",
    ):  # fmt: skip
        assert getattr(plain, name) == getattr(real, name), name
    assert {number: repr(token) for number, token in plain.added_tokens_decoder.items()} == {
        number: repr(token) for number, token in real.added_tokens_decoder.items()
    }
    ours, theirs = (json.loads(one.backend_tokenizer.to_str()) for one in (plain, real))
    for one in (ours, theirs):  # written as null or as an empty text
        one["model"] |= {
            part: one["model"].get(part) or None for part in ("continuing_subword_prefix", "end_of_word_suffix")
        }
    assert ours == theirs
    if real.chat_template is not None:
        assert plain.get_chat_template() == real.get_chat_template()
    assert plain._full is None
    assert plain.model_max_length == real.model_max_length and plain.padding_side == real.padding_side
    assert plain.init_kwargs.keys() == real.init_kwargs.keys()


def test_the_inputs_that_a_file_names_are_the_same(tmp_path: Path) -> None:
    folder = save(byte_level, tmp_path)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    for given in (names, names[:1]):
        file.write_text(json.dumps({**config, "model_input_names": given}))
        plain, real = both(folder)
        assert plain.model_input_names == real.model_input_names == given
        assert plain._full is None


def test_learned_words_and_typed_specials_are_the_same(folder: Path) -> None:
    plain, real = both(folder)
    for tokenizer in (plain, real):
        learn_words(tokenizer, ["<video>", real.eos_token])
    assert len(plain) == len(real)
    for text in ("a<video>b", f"<video>{real.eos_token}"):
        assert plain.encode(text, verbose=False) == real.encode(text, verbose=False)
    pieces = ["a ", " b\n", ""]
    assert encode_rendered(plain, pieces, "<video>") == encode_rendered(real, pieces, "<video>")
    full = full_tokenizer(plain)
    assert full.convert_tokens_to_ids("<video>") == real.convert_tokens_to_ids("<video>") == len(real) - 1


def test_shapes_see_the_same_vocabulary(tmp_path: Path) -> None:
    plain, real = both(save(byte_level, tmp_path))
    ends = frozenset([2])
    assert vocabulary_source(plain, len(real), ends) == vocabulary_source(real, len(real), ends)


def test_transformers_tokenizer_and_it_are_one(tmp_path: Path) -> None:
    plain, real = both(save(byte_level, tmp_path))
    full = full_tokenizer(plain)
    assert isinstance(full, PreTrainedTokenizerBase) and full_tokenizer(plain) is full and full_tokenizer(real) is real
    full.add_tokens(["triangles"])
    assert plain.encode("triangles", verbose=False) == full.encode("triangles") == [len(real)]
    full.chat_template = "{{ messages }}"
    assert plain.chat_template == plain.get_chat_template() == "{{ messages }}"
    plain.chat_template = "other"
    assert full.chat_template == "other"
    full.pad_token = "<tool>"
    full("a longer text", truncation=True, max_length=2, padding="max_length")
    assert plain.encode("a longer text", verbose=False) == real.encode("a longer text")
    assert plain.pad_token == "<tool>" and plain.special_tokens_map["pad_token"] == "<tool>"
    assert plain(["a", "b"])["input_ids"] == real(["a", "b"])["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"add_prefix_space": True},
        {"split_special_tokens": True},
        {"image_token": "<image>"},
        {"bos_token": "<never seen>"},
        {"bos_token": 5},
        {"additional_special_tokens": ["<never seen>"]},
        {"additional_special_tokens": ["<tool>"], "extra_special_tokens": ["<s>"]},
        {"extra_special_tokens": {"image_token": "<tool>"}},
        {"added_tokens_decoder": {"0": {"content": "<unk>"}}},
        {"added_tokens_decoder": {"999": {"content": "<unk>"}}},
        {"padding_side": "up"},
        {"model_max_length": "8"},
        {"chat_template": [{"name": "default", "template": "a"}]},
        {"some_field": 1},
    ],
)
def test_settings_that_are_not_certain_are_left_to_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    file = save(byte_level, tmp_path) / "tokenizer_config.json"
    assert read_plain_tokenizer(tmp_path) is not None
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    assert read_plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", {"type": "Digits", "individual_digits": True}),
        ("normalizer", {"type": "NFKC"}),
        ("decoder", None),
        ("unk_token", "a"),
        ("ignore_merges", True),
        ("id", 1000),
        ("lstrip", True),
        ("add_prefix_space", True),
        ("errors", "strict"),
        ("model_type", "mistral"),
        ("model_type", "gemma"),
    ],
)
def test_a_class_that_would_build_another_one_is_transformers(tmp_path: Path, name: str, part: str, value: Any) -> None:
    save_class(name, tmp_path)
    assert read_plain_tokenizer(tmp_path) is not None
    files = {one: json.loads((tmp_path / one).read_text()) for one in TOKENIZER_FILES}
    saved = files["tokenizer.json"]
    home = {"unk_token": saved["model"], "ignore_merges": saved["model"], "model_type": files["config.json"]}
    home |= {"id": saved["added_tokens"][-1], "lstrip": saved["added_tokens"][0]}
    home |= dict.fromkeys(("add_prefix_space", "errors"), files["tokenizer_config.json"])
    home.get(part, saved)[part] = value
    for one, content in files.items():
        (tmp_path / one).write_text(json.dumps(content))
    assert read_plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("added_tokens.json", "{}"),
        ("tekken.json", "{}"),
        ("config.json", '{"model_type": "mistral"}'),
        ("config.json", '{"model_type": "qwen2"}'),
        ("config.json", '{"model_type": "unheard_of"}'),
        ("config.json", "{}"),
        ("config.json", None),
        ("config.json", '{"model_type": "llama", "transformers_version": "new"}'),
        ("tokenizer_config.json", None),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("additional_chat_templates/tool_use.jinja", "a"),
    ],
)
def test_files_that_are_not_certain_are_left_to_transformers(tmp_path: Path, name: str, text: str | None) -> None:
    save(byte_level, tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    assert read_plain_tokenizer(tmp_path) is None


def test_states_and_cleaning_are_left_to_transformers(tmp_path: Path) -> None:
    save(word_piece, tmp_path, clean_up_tokenization_spaces=True)
    assert read_plain_tokenizer(tmp_path) is None
    shutil.rmtree(tmp_path)
    truncated = byte_level()
    truncated.enable_truncation(5)
    save(byte_level, tmp_path)
    truncated.save(str(tmp_path / "tokenizer.json"))
    assert read_plain_tokenizer(tmp_path) is None


def test_templates_and_special_tokens_of_their_own_files(tmp_path: Path) -> None:
    save(byte_level, tmp_path, chat_template="of the settings")
    (tmp_path / "chat_template.jinja").write_text("of the file")
    plain, real = both(tmp_path)
    assert plain.chat_template == real.chat_template == "of the file"
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<tool>"}')
    plain = read_plain_tokenizer(tmp_path)
    assert plain is None or plain.pad_token == AutoTokenizer.from_pretrained(tmp_path).pad_token


def test_users_and_their_programs_get_transformers_tokenizer(tiny_llm: LLM) -> None:
    tokenizer = tiny_llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and tiny_llm.get_tokenizer() is tokenizer


def test_a_chat_needs_no_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom quire.platform.inputs.tokenizer import load_tokenizer\n"
        "from quire.platform.inputs.chat import render_chat\n"
        "prompt = render_chat(load_tokenizer(sys.argv[1]), [{'role': 'user', 'content': 'Hello'}])\n"
        "print(len(prompt.token_ids), sorted({'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    save(byte_level, tmp_path, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    line = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    tokens, found = printed.split(" ", 1)
    assert int(tokens) > 0 and found.strip() == "[]"
