"""`quire quantize`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli.app import app
from quire.demo import model_path


def quantize(*words: str | Path):
    return CliRunner().invoke(app, ["quantize", *map(str, words)])


@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_folder_that_answers_as_the_setting_does(tmp_path: Path, name: str) -> None:
    out = tmp_path / "new" / "folder"
    result = quantize(model_path(), out, "-q", name)
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout and "MB of weights" in result.stdout and "%" in result.stdout
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quantization"] == name
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    kept, made = (LLM(*args, num_gpu_blocks_override=64, **more) for args, more in (
        ((str(out),), {}), ((), {"quantization": name})
    ))  # fmt: skip
    texts = [llm.generate("Once upon a time", greedy, use_tqdm=False)[0].outputs[0] for llm in (kept, made)]
    assert texts[0].token_ids == texts[1].token_ids and texts[0].logprobs == texts[1].logprobs


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-q", "awq"), "is int8 or int4"),
        (("-q", ""), "is int8 or int4"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    result = quantize(model_path(), tmp_path / "out", *words)
    assert result.exit_code == 1 and why in result.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    result = quantize(model_path(), tmp_path)
    assert result.exit_code == 1 and "is there already" in result.stderr and not list(tmp_path.iterdir())
    absent = quantize("./nowhere", tmp_path / "out")
    assert absent.exit_code == 1 and "no such directory" in absent.stderr
