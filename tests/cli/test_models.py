"""`quire models`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.commands import invoke


def listed() -> dict[str, dict[str, Any]]:
    return {row["architecture"]: row for row in json.loads(invoke("models", "--json"))}


def test_models_lists_what_is_served() -> None:
    row = listed()["LlamaForCausalLM"]
    assert row["capabilities"] == ["text"]
    assert row["package"] == "quire"
    assert row["problem"] is None
    assert "LlamaForCausalLM" in invoke("models")


def test_models_lists_what_transformers_modules_run() -> None:
    row = listed()["PersimmonForCausalLM"]
    assert row["package"] == "transformers" and row["problem"] is None
    assert "attention" in row["promise"]["quire"] and row["promise"]["torch"] == []
    assert listed()["LlamaForCausalLM"]["promise"] is None


@pytest.mark.usefixtures("broken_plugin")
def test_models_marks_a_broken_plugin() -> None:
    row = listed()["BrokenForCausalLM"]
    assert row["package"] == "quire-broken"
    assert "a_package_that_is_not_there" in row["problem"]
    assert "broken" in invoke("models")
    assert listed()["LlamaForCausalLM"]["problem"] is None
