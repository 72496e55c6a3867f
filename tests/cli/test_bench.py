"""`quire bench`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from quire import LLM
from quire.cli import workload
from quire.cli.app import app
from tests.cli.commands import invoke


def test_the_workload_is_the_one_that_was_published() -> None:
    requests = workload.workload()
    assert len(requests) == 32
    assert sum(len(token_ids) for token_ids, _ in requests) == 4379
    assert sum(wanted for _, wanted in requests) == 2526
    assert workload.workload(3, seed=5) == workload.workload(3, seed=5) != workload.workload(3, seed=6)


def test_no_prompt_of_the_workload_has_a_marker() -> None:
    """The bundled model has one for images and one for videos, in a vocabulary of a few hundred."""
    llm = LLM()
    spec = llm.llm_engine.input_processor.image_spec
    markers = {*spec.markers.values(), *spec.placeholders}
    drawn = {token for token_ids, _ in workload.workload_for(llm, 64) for token in token_ids}
    assert len(markers) > 1 and min(markers) > 10 and not markers & drawn


def test_bench_measures_both_engines(plain_model: Path, one_thread: None) -> None:
    report = json.loads(invoke("bench", str(plain_model), "--requests", "2", "--rounds", "2", "--json"))
    lines = {(line["engine"], line["case"]): line for line in report["lines"]}
    assert set(lines) == {(e, c) for e in ("quire", "transformers") for c in ("single", "batch")}
    for line in lines.values():
        assert len(line["turns"]) == 2
        assert line["out_tok_s"] > 0 and line["ratio_to_transformers"] > 0
    assert lines["quire", "single"]["turns"][0]["out_tokens"] == workload.SINGLE_OUTPUT
    for turn in lines["quire", "batch"]["turns"]:
        assert 0 < turn["waste"] < report["block_size"] / 32
        assert turn["preemptions"] == 0


def test_bench_prints_a_table(plain_model: Path) -> None:
    text = invoke("bench", str(plain_model), "--case", "single", "--rounds", "1", "--no-transformers")
    assert "quire" in text and "single" in text and "KV pool" in text


def test_bench_names_an_unknown_model_in_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "absent/model"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
