"""A tokenizer.json read by the `tokenizers` library alone: transformers' import takes longer than the rest of a start.

Only where transformers' tokenizer would be nothing but that: the file as it is, special tokens that it has already, a
chat template. `tests/platform/inputs/test_plain_tokenizer.py` holds the two equal. Everything else is transformers'.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from quire.checkpoint.files import read_json
from quire.checkpoint.plain_config import plain_tokenizer
from quire.errors import CheckpointError
from quire.platform.inputs import rebuilt
from quire.platform.inputs.rebuilt import Uncertain

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INPUTS = ("input_ids", "attention_mask")  # what transformers' classes of these tokenizers say that a model takes
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
# Fields of tokenizer_config.json that change nothing of what is read here, by the types that they may have.
_SILENT: dict[str, tuple[type, ...]] = {
    "model_max_length": (int, float),
    "processor_class": (str,),
    "backend": (str,),
    "model_input_names": (list,),
    "add_bos_token": (bool,),  # transformers drops these two where there is a tokenizer.json
    "add_eos_token": (bool,),
    "clean_up_tokenization_spaces": (bool,),
    "is_local": (bool,),
    "local_files_only": (bool,),
}
_VERSION = re.compile(r"\d+(\.\d+)*(\.dev\d+)?")
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class PlainTokenizer:
    """What quire asks of a transformers tokenizer, answered as that would.

    Whatever else is asked of it comes from transformers' tokenizer itself (`of_transformers`), which is made then. Both
    share one object of the `tokenizers` library, and from then on one chat template.
    """

    def __init__(
        self,
        path: Path,
        backend: Any,
        named: Mapping[str, str],
        extra: Sequence[str],
        template: Any,
        inputs: Sequence[str] = _INPUTS,
    ) -> None:
        self.backend_tokenizer = backend
        self.model_input_names = list(inputs)
        self._path, self._named, self._extra, self._template = path, dict(named), list(extra), template
        self._full: Any = None
        self._lock = threading.Lock()

    def of_transformers(self) -> Any:
        """Transformers' tokenizer, always the same object."""
        with self._lock:
            if self._full is None:
                from transformers import AutoTokenizer

                full = AutoTokenizer.from_pretrained(str(self._path), trust_remote_code=False)
                full._tokenizer = self.backend_tokenizer
                full.chat_template = self._template
                self._full = full
            return self._full

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        key = name.removesuffix("_id")
        if key in _NAMED and self.__dict__.get("_full") is None:
            token = self._named.get(key)
            return token if name == key or token is None else self.convert_tokens_to_ids(token)
        return getattr(self.of_transformers(), name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_transformers()(*args, **kwargs)

    @property
    def chat_template(self) -> Any:
        return self._template if self._full is None else self._full.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self._template = template
        if self._full is not None:
            self._full.chat_template = template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        if self._full is not None:
            return cast(dict[str, str], self._full.special_tokens_map)
        return dict(self._named)

    @property
    def all_special_tokens(self) -> list[str]:
        if self._full is not None:
            return cast(list[str], self._full.all_special_tokens)
        return list(dict.fromkeys([*self._named.values(), *self._extra]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return cast(dict[int, Any], self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        return cast(dict[str, int], self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> Any:
        if self._full is not None or chat_template is not None or not isinstance(self._template, str):
            return self.of_transformers().get_chat_template(chat_template, tools=tools)
        return self._template

    def add_tokens(self, new_tokens: Sequence[Any], special_tokens: bool = False) -> int:
        tokens = list(new_tokens) if isinstance(new_tokens, (list, tuple)) else [new_tokens]
        backend = self.backend_tokenizer
        return int(backend.add_special_tokens(tokens) if special_tokens else backend.add_tokens(tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        if found is None and tokens != self.unk_token:
            return self.unk_token_id
        return found

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids if int(one) not in skipped]

    def encode(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> list[int]:
        if self._full is not None or not isinstance(text, str) or kwargs.keys() - {"verbose"}:
            return cast(list[int], self.of_transformers().encode(text, add_special_tokens=add_special_tokens, **kwargs))
        return list(encoded(self.backend_tokenizer, text, add_special_tokens).ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        ids = [token_ids] if type(token_ids) is int else token_ids
        plain = isinstance(ids, (list, tuple)) and all(type(one) is int for one in ids)
        cleans = kwargs.get("clean_up_tokenization_spaces")
        if self._full is not None or not plain or cleans or kwargs.keys() - {"clean_up_tokenization_spaces"}:
            return self.of_transformers().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def encoded(backend: Any, text: str, add_special_tokens: bool) -> Any:
    """What an object of the `tokenizers` library makes of a text, but for where in it each token stands.

    Its `encode` keeps account of that, which takes a third of the time, and lets no other thread run: with a text of
    60,000 tokens, none for a third of a second.
    """
    (made,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return made


def full_tokenizer(tokenizer: Any) -> Any:
    """Transformers' tokenizer, for those who were promised one."""
    return tokenizer.of_transformers() if isinstance(tokenizer, PlainTokenizer) else tokenizer


def read_plain_tokenizer(path: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder; None where transformers must read it."""
    try:
        return _read(path)
    except (Uncertain, CheckpointError):
        return None


def _read(path: Path) -> PlainTokenizer:
    if (path / "added_tokens.json").exists() or any((path / "additional_chat_templates").glob("*")):
        raise Uncertain
    model, config = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
    version = model.get("transformers_version") or "4"
    kind, name = model.get("model_type"), str(config.get("tokenizer_class"))
    if not _VERSION.fullmatch(str(version)) or (path / "tekken.json").exists():
        raise Uncertain
    if name not in _CLASSES:
        config = rebuilt.settings(name.removesuffix("Fast"), kind, config, path)
    elif not plain_tokenizer(kind):
        raise Uncertain
    from tokenizers import Tokenizer, processors

    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library's own kind, of whatever is wrong
        raise Uncertain from error
    if backend.padding is not None or backend.truncation is not None:
        raise Uncertain
    named, extra, template = _settings(path, config, backend)
    # A decoded text is cleaned up where the model is none of BPE's.
    if config.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE":
        raise Uncertain
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    backend.encode_special_tokens = False
    return PlainTokenizer(path, backend, named, extra, template, config.get("model_input_names", _INPUTS))


def _settings(path: Path, config: Mapping[str, Any], backend: Any) -> tuple[dict[str, str], list[str], Any]:
    """Named special tokens, others, and the chat template. Raises Uncertain."""
    added = backend.get_added_tokens_decoder()
    known = {token.content for token in added.values()}
    named: dict[str, str] = {}
    extras: list[list[str]] = []
    for name, value in config.items():
        if name in _NAMED:
            named |= {name: _content(value, known)} if value is not None else {}
        elif name in _EXTRA:
            extras += [[_content(one, known) for one in value]] if isinstance(value, list) and value else []
            if value and not isinstance(value, list):
                raise Uncertain
        elif name in ("padding_side", "truncation_side"):
            if value not in ("left", "right"):
                raise Uncertain
        elif name == "added_tokens_decoder":
            _check_added(value, added)
        elif name in ("tokenizer_class", "chat_template"):
            continue
        elif not isinstance(value, _SILENT.get(name, ())):
            raise Uncertain
    if len(extras) > 1 or ("added_tokens_decoder" not in config and (path / "special_tokens_map.json").exists()):
        raise Uncertain
    template: Any = config.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise Uncertain
    return {name: named[name] for name in _NAMED if name in named}, (extras or [[]])[0], template


def _content(value: Any, known: set[str]) -> str:
    """The text of a special token that the tokenizer has."""
    text = value.get("content") if isinstance(value, dict) and value.get("__type") == "AddedToken" else value
    if not isinstance(text, str) or text not in known:
        raise Uncertain
    return text


def _check_added(value: Any, added: Mapping[int, Any]) -> None:
    """tokenizer_config.json's account of added tokens must be that of tokenizer.json, or of some of them."""
    for number, fields in value.items() if isinstance(value, dict) else [(None, None)]:
        token = added.get(int(number)) if isinstance(number, str) and number.isdecimal() else None
        if token is None or not isinstance(fields, dict) or set(fields) - set(_TOKEN_FIELDS):
            raise Uncertain
        if fields.keys() != set(_TOKEN_FIELDS) or any(getattr(token, name) != one for name, one in fields.items()):
            raise Uncertain
