"""`quire doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

import quire
from quire.demo import model_path
from quire.kernels import backend
from tests.cli.commands import fresh, invoke

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("broken_plugin")
def test_doctor_names_a_broken_plugin_and_still_says_that_quire_runs() -> None:
    found = json.loads(invoke("doctor", "--json"))
    assert found["can_run"]
    assert any("BrokenForCausalLM" in problem["what"] for problem in found["problems"])


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
