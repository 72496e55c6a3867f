"""CUDA's own compiler takes every kernel, without warnings and without registers that do not suffice.

For one architecture: it takes minutes. The installation itself compiles for all (`test_built_where_nvcc_is`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests.cuda.emulated import ROOT, SOURCES

NVCC = shutil.which("nvcc")
ARCHITECTURES = ("90a",)
FLAGS = ["-std=c++17", "--fmad=false", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-Wall,-Werror", "--Werror", "all-warnings"]
FLAGS += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
# By file: bytes that any one of its kernels may spill.
SPILLS: dict[str, int] = {}
FILES = sorted(path.name for path in SOURCES.glob("*.cu"))

pytestmark = pytest.mark.skipif(NVCC is None, reason="CUDA's compiler (nvcc) is not on the PATH")


@cache
def reports() -> dict[str, str]:
    """What the compiler says of each file, whether or not it takes it; kept until a source changes."""
    folder = ROOT / "build" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    assert NVCC is not None
    version = subprocess.run([NVCC, "--version"], capture_output=True, check=True).stdout
    headers = sorted([*SOURCES.glob("*.h"), *(ROOT / "csrc").glob("*.h"), Path(__file__)])
    common = version + b"".join(path.read_bytes() for path in headers)

    def report(name: str) -> str:
        source = SOURCES / name
        digest = hashlib.sha256(common + source.read_bytes()).hexdigest()[:16]
        kept = folder / f"{source.stem}-{digest}.txt"
        if not kept.exists():
            target = kept.with_suffix(f".{os.getpid()}.o")
            done = subprocess.run(
                [str(NVCC), *FLAGS, "-c", str(source), "-o", str(target)], capture_output=True, text=True
            )
            target.unlink(missing_ok=True)
            for old in folder.glob(f"{source.stem}-*.txt"):
                old.unlink(missing_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(f"exit {done.returncode}\n{done.stdout}{done.stderr}")
            partial.rename(kept)
        return kept.read_text()

    # The longest first.
    order = sorted(FILES, key=lambda name: -(SOURCES / name).stat().st_size)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(order, threads.map(report, order), strict=True))


def test_built_where_nvcc_is() -> None:
    """The installation goes on without what cannot be built: here, that is an error."""
    found = importlib.util.find_spec("quire.kernels")
    assert found is not None and found.submodule_search_locations is not None
    names = [path.name for folder in found.submodule_search_locations for path in Path(folder).glob("_cuda.*")]
    assert names, f"{NVCC} is there, and quire.kernels._cuda was not built: pip install -v -e . says why"
    code = "import quire.kernels._cuda as c; assert c.device == 'cuda' and c.architectures; c.attention_workspace"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FILES)
def test_a_file_compiles(name: str) -> None:
    report = reports()[name]
    assert report.startswith("exit 0\n"), report


@pytest.mark.parametrize("name", FILES)
def test_registers_suffice(name: str) -> None:
    report = reports()[name]
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", report)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", report)]
    has_kernels = "__global__" in (SOURCES / name).read_text()  # the others start those of other files
    assert {number for _, number in kernels} == set(ARCHITECTURES if has_kernels else ())
    assert len(spills) >= len(kernels)
    allowed = SPILLS.get(name, 0)
    worst = re.findall(r"Function properties for (\w+)\n.* (\d+) bytes spill stores", report)
    assert max(spills, default=0) <= allowed, [(kernel, number) for kernel, number in worst if int(number) > allowed]
