"""The GPU's kernels, compiled for the host: `csrc/cuda` with its emulator, as the module `quire.kernels._cuda`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"]
FLAGS += ["-ffp-contract=off", "-fvisibility=hidden", "-DQUIRE_CUDA_EMULATION"]


def build(sources: Sequence[Path] = (), name: str = "_cuda") -> Path:
    """The compiled module, or one of other sources, made anew when a source has changed.

    Raises RuntimeError with what the compiler says.
    """
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("the emulated kernels need a C++17 compiler")
    headers = [*SOURCES.rglob("*.h"), *(ROOT / "csrc").glob("*.h"), Path(__file__)]
    common = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(headers))).hexdigest()
    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    sources = sources or sorted([*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cpp")])
    objects = [folder / f"{path.stem}-{_digest(common, path)}.o" for path in sources]
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]

    def compile_one(source: Path, target: Path) -> None:
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")
            _run([compiler, *FLAGS, *include, "-x", "c++", "-c", str(source), "-o", str(partial)])
            for old in folder.glob(f"{source.stem}-*.o"):
                old.unlink(missing_ok=True)
            partial.rename(target)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, sources, objects))
    digest = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:16]
    module = folder / f"{name}-{digest}.so"
    if not module.exists():
        partial = module.with_suffix(f".{os.getpid()}")
        _run([compiler, "-shared", *map(str, objects), "-o", str(partial)])
        partial.rename(module)
    return module


def load() -> ModuleType:
    """`quire.kernels.cuda` over the emulated module, whose tensors lie on the CPU.

    A process has one of the two: tests/conftest.py lets those of the emulation run first.
    """
    if "quire.kernels.cuda" not in sys.modules:
        spec = importlib.util.spec_from_file_location("quire.kernels._cuda", build())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["quire.kernels._cuda"] = module
        import quire.kernels

        quire.kernels._cuda = module  # type: ignore[attr-defined]
    from quire.kernels import cuda

    assert cuda.DEVICE == "cpu", "the kernels for a GPU were imported before: run the emulation's tests by themselves"
    return cuda


def _digest(common: str, path: Path) -> str:
    return hashlib.sha256(common.encode() + path.read_bytes()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
