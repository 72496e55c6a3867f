"""The YAML file of `quire serve`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from quire.server import launch as serve
from tests.cli.commands import Served

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_form_of_value_in_a_file(served: Served) -> None:
    task = served(
        yaml="""
model: some/model
port: 5
media_fetch_timeout: 2.5
enable-prefix-caching: false
enable_lora: true
limit-mm-per-prompt: {image: 3}
served-model-name: [one, two]
api-key: alone
lora-modules:
  - a=x
  - {name: b, path: y}
log-format: json
disable-access-log: true
override-generation-config: {temperature: 0.5}
"""
    )
    assert (task.settings["model"], task.settings["port"], task.settings["media_fetch_timeout"]) == (
        "some/model",
        5,
        2.5,
    )
    assert (task.settings["enable_prefix_caching"], task.settings["enable_lora"]) == (False, True)
    assert task.settings["limit_mm_per_prompt"] == {"image": 3}
    assert (task.settings["served_model_name"], task.settings["api_key"]) == (["one", "two"], ["alone"])
    assert [serve.Module.parse(text) for text in task.settings["lora_modules"]] == [
        serve.Module("a", "x"),
        serve.Module("b", "y"),
    ]
    assert (task.settings["log_format"], task.settings["disable_access_log"]) == ("json", True)
    assert task.settings["override_generation_config"] == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("yaml", "word"),
    [
        ("prot: 5", "prot"),
        ("words: some/model", "words"),
        ("config: other.yaml", "config"),
        ("help: true", "help"),
        ("- port", "names and values"),
        ("port: [", "cannot be read"),
        ("port: x", "--port"),
        ("host: [a, b]", "host"),
    ],
)
def test_a_file_that_is_wrong(served: Served, yaml: str, word: str) -> None:
    assert word in served.complaint(yaml=yaml)


def test_a_file_that_is_not_there(served: Served) -> None:
    assert "nothing.yaml" in served.complaint("--config", "nothing.yaml")


def test_the_file_may_be_named_by_a_variable(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "named.yaml"
    file.write_text("port: 7", encoding="utf-8")
    assert served(QUIRE_CONFIG=str(file)).settings["port"] == 7


BOMB = "hf-overrides:\n  a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  {here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n" for before, here in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("port: 1\nport: 2\n", "'port' is there twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "'max_num_seqs' is there twice"),
        ("hf-overrides: {a: {b: 1, b: 2}}\n", "'b' is there twice"),
        ("api-key: [~]\n", "an entry without a value"),
        ("hf-overrides: &x {a: *x}\n", "lies in itself"),
        (BOMB, "holds too much"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("hf-overrides: " + "{a: " * 200 + "1" + "}" * 200, "nested too deeply"),
        ("max-queue: " + "9" * 5000, "cannot be read"),
    ],
    ids=["twice", "two names", "inner", "null", "circle", "bomb", "lists", "objects", "digits"],
)
def test_a_file_that_says_no_one_thing_is_refused(served: Served, yaml: str, message: str) -> None:
    assert message in " ".join(served.complaint(yaml=yaml).replace("│", " ").split())


def test_a_file_may_use_anchors(served: Served) -> None:
    task = served(yaml="lora-root: &roots [/a, /b]\nhf-overrides: {x: *roots, <<: {y: 1}}\n")
    assert task.settings["lora_root"] == ["/a", "/b"] and task.settings["hf_overrides"] == {"x": ["/a", "/b"], "y": 1}
