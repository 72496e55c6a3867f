"""Every command line that README and docs show is one that the parsers take, and every verb of `quire` runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import typer
from typer.testing import CliRunner

from quire.cli.app import app
from quire.demo import picture_path
from tests.benchmarks.benchmarks import BENCHMARKS, parser_of
from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# What vLLM has is told there in a table of its own, which has its own tests.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != "from-vllm.md"]
QUIRE: Any = typer.main.get_command(app)

_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")

# Programs whose options are their own affair, and where a page shows them.
_FOREIGN = re.compile(r"\S*(?:pip|compute-sanitizer|curl|docker|llm|lm_eval|optimum-cli|vllm)(?= )")


def code_of(page: Path) -> Iterator[str]:
    """All that a page shows as code: lines of blocks, continued ones joined, and what stands between backticks."""
    text = page.read_text()
    blocks = [block for pattern in (_FENCED, _INDENTED) for block in pattern.findall(text)]
    for block in blocks:
        yield from (line.strip().removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())
    yield from _INLINE.findall(_FENCED.sub("", text))


def shown(pattern: str) -> list[tuple[str, str, list[str]]]:
    """(page, name, arguments) of each command line that the pattern, whose group is the name, begins."""
    found = []
    for page in PAGES:
        for code in code_of(page):
            if match := re.match(pattern, code):
                words = shlex.split(code[match.end() :], comments=True)
                words = [word.strip("[]") for word in words if word != "..."]
                found.append((page.name, match[1], words[: words.index("|")] if "|" in words else words))
    return found


VERBS = shown(r"quire ([a-z]+(?:-[a-z]+)*)(?=\s|$)")
SCRIPTS = shown(r"(?:python )?benchmarks/(\w+)\.py(?=\s|$)")


def test_the_pages_show_every_verb_and_most_benchmarks() -> None:
    """And the collection finds them."""
    assert {verb for _, verb, _ in VERBS} == set(QUIRE.commands)
    assert {name for _, name, _ in SCRIPTS} >= {"cpu", "gpu", "images", "lora", "serve", "throughput"}


@pytest.mark.parametrize(("page", "verb", "words"), VERBS, ids=lambda value: " ".join(value) if value else "-")
def test_a_shown_command_is_taken(
    page: str, verb: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("port: 8000\n")  # which some are shown with
    monkeypatch.chdir(tmp_path)
    take(verb, list(words))


def take(verb: str, words: list[str]) -> None:
    """Parse, and do nothing. An option at the end is only named: its value is not shown."""
    if words and words[-1].startswith("--"):
        assert words.pop() in {"--help", *(flag for one in QUIRE.commands[verb].params for flag in one.opts)}
    QUIRE.commands[verb].make_context(verb, words, parent=QUIRE.context_class(QUIRE))


@pytest.mark.parametrize(("page", "name", "words"), SCRIPTS, ids=lambda value: " ".join(value) if value else "-")
def test_a_shown_benchmark_is_taken(page: str, name: str, words: list[str]) -> None:
    if name == "throughput":
        take("bench", list(words))
        return
    parser = parser_of(name)
    if "--help" not in words:
        parser.parse_args(
            words or ["MODEL"] * any(action.dest == "model" for action in parser._get_positional_actions())
        )


def test_every_flag_that_is_named_exists() -> None:
    known = {flag for command in QUIRE.commands.values() for one in command.params for flag in one.opts}
    known |= {flag for command in QUIRE.commands.values() for one in command.params for flag in one.secondary_opts}
    known |= {flag for name in BENCHMARKS if name != "throughput" for flag in parser_of(name)._option_string_actions}
    known |= {"--help", "--version", "--fmad"}  # the last is of nvcc
    ours = [(page.name, code) for page in PAGES for code in code_of(page) if not _FOREIGN.match(code)]
    named = {(page, flag) for page, code in ours for flag in _FLAG.findall(code)}
    assert len(named) > 40
    assert not {(page, flag) for page, flag in named if flag not in known}


# -- every verb runs ----------------------------------------------------------------------------------------------


RUNS = {
    "run": ["--image", str(picture_path()), "What do you see?"],
    "chat": ["URL", "-q", "What do you see?", "--image", str(picture_path()), "--temperature", "0"],
    "complete": ["URL", "Once upon a time", "--max-tokens", "9", "--temperature", "0"],
    "top": ["URL", "--once"],
    "models": [],
    "doctor": [],
    "bench": ["--requests", "1", "--rounds", "1"],  # of the bundled model, which sees: transformers must know that
}


def test_every_verb_is_run() -> None:
    """Batches are run in test_run_batch.py here, `quantize` in test_quantize.py, `deploy` in tests/distributed/."""
    assert {*RUNS, "serve", "run-batch", "quantize", "deploy"} == set(QUIRE.commands)


@pytest.mark.parametrize("verb", RUNS)
def test_a_verb_runs(verb: str, demo: ServerProcess) -> None:
    words = [demo.url if word == "URL" else word for word in RUNS[verb]]
    result = CliRunner().invoke(app, [verb, *words])
    assert result.exit_code == 0, result.output
    assert len(result.stdout) > 5


def test_serve_runs(demo: ServerProcess) -> None:
    assert httpx.get(f"{demo.url}/health").status_code == 200
    assert demo.log.index("loading the bundled model") < demo.log.index("listening on")


@pytest.mark.parametrize("verb", [None, *sorted(QUIRE.commands)])
def test_help_is_whole_at_80_columns(verb: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of an option is cut."""
    for name, value in {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [*([verb] if verb else []), "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    shown = set(_FLAG.findall(result.stdout.replace("[no-]", "")))
    wanted = {one.opts[0] for one in QUIRE.commands[verb].params if one.opts[0].startswith("--")} if verb else set()
    assert wanted <= shown, wanted - shown
