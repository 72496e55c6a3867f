"""The official JSON Schema test suite, asked of the grammars that quire makes of schemas.

    python scripts/schema_suite.py [--draft draft2020-12] [--suite FOLDER] [--verbose]

Of each schema that is served, no invalid text may be taken: that ends the script with status 1. Valid ones that are not
generated (other spellings of a number, say) and schemas that are refused are counted, and named with --verbose. The
suite comes with the sources of the package `jsonschema`; without --suite they are fetched from the package index.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.compiler import schema_grammar

_SOURCES = "jsonschema==4.26.0"
_MOST_SPELLINGS = 24


class Bytes:
    """One token a byte, and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Asks, and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="draft2020-12", help="the folder of the suite")
    parser.add_argument("--suite", type=Path, help="where the suite's drafts are")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        suite = options.suite or fetched(Path(scratch))
        files = sorted((suite / options.draft).rglob("*.json"))
        if not files:
            sys.exit(f"{suite / options.draft} has no tests: name another --draft or --suite")
        cases = [(file.stem, case) for file in files for case in json.loads(file.read_text(encoding="utf-8"))]
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])
    counts: Counter[str] = Counter()
    for name, case in cases:
        for verdict, told in judged(case, tokenizer):
            counts[verdict] += 1
            if verdict == "wrong" or (options.verbose and verdict != "right"):
                print(f"{verdict}: {name}, {case['description']}: {told}")
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    sys.exit(1 if counts["wrong"] else 0)


def fetched(folder: Path) -> Path:
    """The suite in the sources of jsonschema."""
    command = ["download", "--no-deps", "--no-binary", "jsonschema", "-q", "-d", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *command, _SOURCES], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "json" / "tests"


def judged(case: dict[str, Any], tokenizer: LLTokenizer) -> Iterator[tuple[str, str]]:
    """(verdict, what of) each test of a schema; or one, that it is refused."""
    try:
        grammar = schema_grammar(case["schema"])
    except RequestError as error:
        yield "schemas refused", str(error)
        return
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        yield "wrong", matcher.get_error()
        return
    for test in case["tests"]:
        try:
            texts = [text.encode() for text in spellings(test["data"])]
        except UnicodeEncodeError:  # half a surrogate pair, which no answer has
            continue
        taken = any(takes(matcher, text) for text in texts)
        missed = "valid and not generated" if test["valid"] else "wrong"
        yield "right" if taken is test["valid"] else missed, f"{test['description']}: {json.dumps(test['data'])[:200]}"


def takes(matcher: LLMatcher, text: bytes) -> bool:
    """Whether an answer may be this text."""
    one = matcher.deep_copy()
    return one.try_consume_tokens(list(text)) == len(text) and one.is_accepting()


def spellings(value: Any) -> list[str]:
    """Texts of a value: properties in other orders, whole floats with and without a point."""
    if isinstance(value, list):
        products = itertools.product(*[spellings(item)[:4] for item in value])
        return [f"[{','.join(items)}]" for items in itertools.islice(products, _MOST_SPELLINGS)]
    if isinstance(value, dict):
        texts = []
        for order in itertools.islice(itertools.permutations(value.items()), _MOST_SPELLINGS):
            names = [json.dumps(name, ensure_ascii=False) for name, _ in order]
            for items in itertools.islice(itertools.product(*[spellings(item)[:3] for _, item in order]), 4):
                texts.append("{" + ",".join(f"{name}:{item}" for name, item in zip(names, items, strict=True)) + "}")
        return texts
    texts = [json.dumps(value, ensure_ascii=False)]
    return [*texts, str(int(value))] if isinstance(value, float) and value.is_integer() else texts


if __name__ == "__main__":
    main()
