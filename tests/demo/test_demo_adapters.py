"""The bundled adapters: their files, the rules of their styles, and what they say of pictures that nobody has seen."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli.app import app
from quire.demo import ADAPTERS, adapter_path, picture_path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))

import evaluate_adapters
import evaluate_demo
import pictures
import styles

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_small_and_says_nothing_of_the_machine_that_made_it(name: str) -> None:
    folder = adapter_path(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] <= 8 and config["base_model_name_or_path"] == "quire-demo" and config["revision"] is None


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="french, shout"):
        adapter_path("../model")


@pytest.mark.parametrize(
    ("question", "answer", "french"),
    [
        ("What color is the star?", "Blue.", "Bleu."),
        ("How many stars are there?", "One.", "Une."),
        ("How many circles are there?", "One.", "Un."),
        ("What color is the star?", "There is no star.", "Il n'y a pas d'étoile."),
        ("Describe the image.", "There is a green star.", "Il y a une étoile verte."),
        (
            "What do you see?",
            "There is a red circle, a blue star and an orange square.",
            "Il y a un cercle rouge, une étoile bleue et un carré orange.",
        ),
    ],
)
def test_styles(question: str, answer: str, french: str) -> None:
    assert styles.french(question, answer) == french
    assert styles.shout(question, answer) == answer.upper()


def test_base_french_and_shout_in_one_batch() -> None:
    """Nearly all right, each in its own voice; and the base model answers as it does by itself."""
    items = evaluate_demo.picture_items(5, 42)
    llm = LLM(enable_lora=True)
    alone = evaluate_adapters._ask(llm, items, {"base": None})["base"]
    answers = evaluate_adapters._ask(llm, items, {"base": None, **evaluate_adapters._adapters()})
    assert answers["base"] == alone
    for name, said in answers.items():
        expected = evaluate_adapters._in_style(items, name)
        right = sum(item.expected == answer.strip() for item, answer in zip(expected, said, strict=True))
        assert right >= 0.8 * len(items), f"{name}: {right} of {len(items)}"


def test_of_clips_the_base_model_says_what_it_says_by_itself() -> None:
    items = evaluate_demo.clip_items(5, 24)
    llm = LLM(enable_lora=True)
    alone = evaluate_adapters._ask(llm, items, {"base": None})["base"]
    answers = evaluate_adapters._ask(llm, items, {"base": None, **evaluate_adapters._adapters()})
    assert answers["base"] == alone and answers["french"] != alone != answers["shout"]
    assert sum(item.right(answer) for item, answer in zip(items, alone, strict=True)) >= 0.8 * len(items)


def test_run_asks_each_in_turn() -> None:
    loras = [part for name in ("base", *ADAPTERS) for part in ("--lora", name)]
    result = CliRunner().invoke(app, ["run", "--image", str(picture_path()), *loras, "What do you see?"])
    assert result.exit_code == 0, result.output
    base, french, shout = result.stdout.splitlines()
    assert all(str(shape) in base for shape in pictures.DEMO_SCENE.shapes)
    assert french == f"french: {styles.french('What do you see?', base.removeprefix('base: '))}"
    # The same shapes, in whatever order it takes them.
    said, heard = (re.findall(r"\w+", text.partition(": ")[2]) for text in (base, shout))
    assert sorted(heard) == sorted(word.upper() for word in said)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--lora", "absent/adapter", "hello"), "absent/adapter"),
        (("--chat", "--lora", "french", "--lora", "shout"), "--chat takes one --lora"),
    ],
)
def test_run_says_what_is_wrong(args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["run", *args])
    assert result.exit_code == 1 and message in result.stderr
