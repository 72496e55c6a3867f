"""The commands that tell about quire: help, models, doctor, bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import quire
from quire.cli import bench
from quire.cli.app import app
from quire.demo import model_path
from quire.kernels import backend
from quire.server import cores


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def fresh(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m quire` in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if k not in ("QUIRE_KERNELS", "QUIRE_ISA")}
    return subprocess.run(
        [sys.executable, "-m", "quire", *args],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
    )


def test_help_names_every_command() -> None:
    text = invoke("--help")
    for command in ("run", "models", "doctor", "bench"):
        assert command in text
        assert "Usage" in invoke(command, "--help")


def test_python_m_quire_is_the_command() -> None:
    assert fresh("--version").stdout == f"quire {quire.__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2


# -- models -----------------------------------------------------------------------------------------------


def listed() -> dict[str, dict[str, Any]]:
    return {row["architecture"]: row for row in json.loads(invoke("models", "--json"))}


def test_models_lists_what_is_served() -> None:
    row = listed()["LlamaForCausalLM"]
    assert row["capabilities"] == ["text"]
    assert row["package"] == "quire"
    assert row["problem"] is None
    assert "LlamaForCausalLM" in invoke("models")


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "quire_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.models]\nBrokenForCausalLM = quire_broken:Broken\n")
    (tmp_path / "quire_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("broken_plugin")
def test_models_marks_a_broken_plugin() -> None:
    row = listed()["BrokenForCausalLM"]
    assert row["package"] == "quire-broken"
    assert "a_package_that_is_not_there" in row["problem"]
    assert "broken" in invoke("models")
    assert listed()["LlamaForCausalLM"]["problem"] is None


@pytest.mark.usefixtures("broken_plugin")
def test_doctor_names_a_broken_plugin_and_still_says_that_quire_runs() -> None:
    found = json.loads(invoke("doctor", "--json"))
    assert found["can_run"]
    assert any("BrokenForCausalLM" in problem["what"] for problem in found["problems"])


# -- doctor -----------------------------------------------------------------------------------------------


def test_doctor_agrees_with_what_is_loaded() -> None:
    found = json.loads(invoke("doctor", "--json"))
    assert found["can_run"]
    assert found["software"]["quire"] == quire.__version__
    assert found["software"]["torch"] == torch.__version__
    assert found["software"]["transformers"] == transformers.__version__
    assert found["kernels"]["in_use"] == backend().__name__.rpartition(".")[2]
    assert found["processor"]["threads"] == torch.get_num_threads()
    assert found["models"]["bundled"] == str(model_path())
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["machine_bytes"]
    assert "quire can run" in invoke("doctor")


def test_doctor_says_that_the_reference_kernels_are_forced() -> None:
    result = fresh("doctor", "--json", QUIRE_KERNELS="reference")
    found = json.loads(result.stdout)
    assert result.returncode == 0
    assert found["kernels"]["in_use"] == "reference"
    assert found["kernels"]["isa"] is None
    assert found["kernels"]["why"] == "QUIRE_KERNELS=reference"
    assert any("QUIRE_KERNELS" in problem["what"] for problem in found["problems"])


def test_doctor_says_which_instruction_set_is_forced() -> None:
    kernels = json.loads(fresh("doctor", "--json", QUIRE_ISA="portable").stdout)["kernels"]
    assert kernels["in_use"] == "native"
    assert kernels["isa"] == "portable"
    assert "portable" in kernels["available_isas"]


@pytest.mark.parametrize("name", ["QUIRE_ISA", "QUIRE_KERNELS"])
def test_doctor_names_a_variable_that_is_wrong(name: str) -> None:
    result = fresh("doctor", "--json", **{name: "foo"})
    found = json.loads(result.stdout)
    assert result.returncode == 1 and not found["can_run"]
    assert [f"{name}=foo" in problem["what"] for problem in found["problems"] if problem["fatal"]] == [True]
    assert not any("Reinstall" in problem["way_out"] for problem in found["problems"])


def test_doctor_exits_with_1_when_quire_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is not there')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = fresh("doctor", "--json", PYTHONPATH=path)
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert not found["can_run"]
    assert any(p["fatal"] and "libtorch is not there" in p["what"] for p in found["problems"])
    assert "Traceback" not in result.stderr
    assert "quire cannot run" in fresh("doctor", PYTHONPATH=path).stdout


# -- bench ------------------------------------------------------------------------------------------------


def test_the_workload_is_the_one_that_was_published() -> None:
    requests = bench.workload()
    assert len(requests) == 32
    assert sum(len(token_ids) for token_ids, _ in requests) == 4379
    assert sum(wanted for _, wanted in requests) == 2526
    assert bench.workload(3, seed=5) == bench.workload(3, seed=5) != bench.workload(3, seed=6)


def test_bench_measures_both_engines(plain_model: Path) -> None:
    report = json.loads(invoke("bench", str(plain_model), "--requests", "3", "--rounds", "2", "--json"))
    lines = {(line["engine"], line["case"]): line for line in report["lines"]}
    assert set(lines) == {(e, c) for e in ("quire", "transformers") for c in ("single", "batch")}
    for line in lines.values():
        assert len(line["turns"]) == 2
        assert line["out_tok_s"] > 0 and line["ratio_to_transformers"] > 0
    assert lines["quire", "single"]["turns"][0]["out_tokens"] == bench.SINGLE_OUTPUT
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


@pytest.mark.parametrize(
    ("share", "threads", "used"),
    [("100000 100000", 4, 1), ("250000 100000", 4, 2), ("max 100000", 1, None), ("50000 100000", 4, 1), ("", 1, None)],
)
def test_threads_keep_to_the_containers_share(
    monkeypatch, tmp_path, share: str, threads: int, used: int | None
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(cores, "_SHARE", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(share)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    assert cores.use_share() == used and set_to == ([] if used is None else [used])
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert cores.use_share() is None
