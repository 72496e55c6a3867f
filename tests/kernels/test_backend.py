"""Which implementation answers: native, or the torch twins where it is missing or unwanted."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire.kernels
from quire.kernels import backends

pytestmark = pytest.mark.slow

CALL = (
    "import torch, quire.kernels as k\n"
    "x = torch.ones(2, 4)\n"
    "for _ in range(3): assert k.linear(x, [x], [None])[0, 0] == 4\n"
    "print(k.backend().__name__)\n"
)
# An import hook under which the extension does not exist.
HIDE = (
    "import sys\n"
    "class Hide:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name == 'quire.kernels._C': raise ImportError('no extension here')\n"
    "sys.meta_path.insert(0, Hide())\n"
)


def run(code: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_reference_on_demand() -> None:
    name, errors = run(CALL, QUIRE_KERNELS="reference")
    assert name == "quire.kernels.reference" and "RuntimeWarning" not in errors


def test_missing_extension_warns_once() -> None:
    name, errors = run(HIDE + CALL, QUIRE_KERNELS="")
    assert name == "quire.kernels.reference"
    assert errors.count("RuntimeWarning") == 1 and "no extension here" in errors


def test_built_where_a_compiler_is() -> None:
    """An installation outlives a failed build, and tests of the native kernels are skipped then: this one is not."""
    reason = ""
    try:
        importlib.import_module("quire.kernels.native")
    except ImportError as error:
        reason = str(error)
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if reason and not compiler:
        pytest.skip("no C++ compiler to build the native kernels with")
    if reason:
        says = f"the native kernels are missing ({reason}) although there is a C++ compiler, {compiler}"
        pytest.fail(f"{says}: `pip install -v -e .` in the repository shows the build's errors", pytrace=False)


def test_native_where_it_was_built() -> None:
    pytest.importorskip("quire.kernels.native")
    name, errors = run(CALL, QUIRE_KERNELS="")
    assert name == "quire.kernels.native" and "RuntimeWarning" not in errors


@pytest.mark.parametrize(("sources", "way_out"), [(".", "start Python in another one"), ("nowhere", "reinstall quire")])
def test_kernels_that_are_not_there_are_missed_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: str, way_out: str
) -> None:
    """Python that is started within a clone finds its sources before what was installed."""
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    monkeypatch.delattr(quire.kernels, "native", raising=False)
    monkeypatch.setitem(sys.modules, "quire.kernels.native", None)
    monkeypatch.setattr(backends, "_CSRC", tmp_path / sources)
    with pytest.warns(RuntimeWarning, match=way_out):
        assert backends.backend.__wrapped__().__name__ == "quire.kernels.reference"
