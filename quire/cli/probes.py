"""What `quire doctor` looks at.

Every finding is read from the thing itself (the imported library, the loaded kernels), not from what was
configured; a probe that fails is a finding, never a traceback.
"""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from quire import __version__
from quire.server.cores import usable_cores


@dataclass(frozen=True)
class Problem:
    """Something that is missing or slow. fatal: quire cannot run."""

    what: str
    way_out: str
    fatal: bool = False


@dataclass
class Findings:
    """Values by section and name, for people and for JSON; and the problems."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        return not any(problem.fatal for problem in self.problems)


def examine() -> Findings:
    """Look at everything."""
    found = Findings()
    for name, probe in _PROBES.items():
        found.sections[name] = probe(found)
    return found


# Each probe fills one section.


def _software(found: Findings) -> dict[str, Any]:
    versions: dict[str, Any] = {"quire": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"):
        try:
            versions[name] = import_module(name).__version__
        except Exception as error:  # a broken installation raises anything, from ImportError to OSError
            versions[name] = None
            found.problems.append(
                Problem(f"{name} cannot be imported ({_line(error)}).", f"Reinstall it: pip install {name}", True)
            )
    found.problems += _unmet_requirements()
    return versions


def _unmet_requirements() -> list[Problem]:
    """Installed versions that quire's own metadata does not allow."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in metadata.requires("quire-llm") or ()]
    except (ImportError, metadata.PackageNotFoundError):  # a source tree: nothing says what is wanted
        return []
    problems = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not requirement.specifier.contains(version, prereleases=True):
            what = f"{requirement.name}: {version} is installed, {requirement} is needed."
            problems.append(Problem(what, f"Mend it: pip install '{requirement}'", True))
    return problems


def _kernels(found: Findings) -> dict[str, Any]:
    wish, isa_wish = os.environ.get("QUIRE_KERNELS", ""), os.environ.get("QUIRE_ISA")
    forced = wish == "reference"
    if wish not in ("", "native", "reference"):
        what = f"QUIRE_KERNELS={wish} names no kernels."
        found.problems.append(Problem(what, "Unset it, or set it to native or reference.", True))
        return {"in_use": None, "why": f"QUIRE_KERNELS={wish}", "isa": None, "available_isas": []}
    try:
        from quire.kernels import native
    except ValueError as error:  # set_isa's: the extension itself is there
        if not forced:
            what = f"QUIRE_ISA={isa_wish} cannot be used ({_line(error)})."
            found.problems.append(Problem(what, "Unset it, or set it to one that this machine has.", True))
        return {
            "in_use": "reference" if forced else None,
            "why": "QUIRE_KERNELS=reference" if forced else f"QUIRE_ISA={isa_wish}",
            "isa": None,
            "available_isas": _available_isas(),
        }
    except Exception as error:
        if not forced:
            compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
            way_out = "Reinstall quire." if compiler else "Install a C++17 compiler, then reinstall quire."
            found.problems.append(Problem(f"No native kernels, quire is slow ({_line(error)}).", way_out))
        why = "QUIRE_KERNELS=reference" if forced else _line(error)
        return {"in_use": "reference", "why": why, "isa": None, "available_isas": []}
    isas = {"available_isas": native.available_isas()}
    if forced:
        found.problems.append(
            Problem("QUIRE_KERNELS=reference forces the slow torch kernels.", "Unset it for the native ones.")
        )
        return {"in_use": "reference", "why": "QUIRE_KERNELS=reference", "isa": None, **isas}
    why = f"built and loaded, QUIRE_ISA={isa_wish}" if isa_wish else "built and loaded"
    return {"in_use": "native", "why": why, "isa": native.isa(), **isas}


def _available_isas() -> list[str]:
    try:
        from quire.kernels import _C

        return list(_C.available_isas())
    except Exception:  # without the wrapper around it, nothing is certain
        return []


def _processor(found: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": _cpu_name(), "cores": usable_cores(), "cores_of_machine": os.cpu_count()}
    from quire.platform.execution.numa import nodes

    facts["numa_nodes"] = [f"{number}: {_runs(own)}" for number, own in enumerate(nodes())]
    facts["threads"] = facts["thread_pool"] = None
    try:
        import torch

        facts["threads"], facts["thread_pool"] = torch.get_num_threads(), "torch's"
        from quire.kernels import backend, native

        if backend() is native:
            facts["threads"], facts["thread_pool"] = native.num_threads(), native.thread_pool()
    except Exception:  # `software` and `kernels` have said it
        pass
    if facts["threads"] and facts["threads"] > facts["cores"]:
        found.problems.append(
            Problem(
                f"{facts['threads']} threads for {facts['cores']} cores.",
                f"Set OMP_NUM_THREADS={facts['cores']}: threads that wait for a core slow all others down.",
            )
        )
    return facts


def _runs(numbers: Sequence[int]) -> str:
    """0-3,8 of [0, 1, 2, 3, 8]."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory(found: Findings) -> dict[str, Any]:
    try:
        import psutil

        from quire.huge_pages import available_bytes
    except Exception as error:
        found.problems.append(Problem(f"Memory cannot be read ({_line(error)}).", "Reinstall quire.", True))
        return {}
    try:
        limit: int | None = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = None
    available = available_bytes()
    if available < 1e9:
        found.problems.append(
            Problem(
                f"Only {available / 1e6:.0f} MB of memory are available.",
                "Free some; torch and transformers alone take about half a gigabyte.",
            )
        )
    return {
        "available_bytes": available,
        "machine_bytes": psutil.virtual_memory().total,
        "container_limit_bytes": limit,
    }


def _device(found: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "in_use": "cpu",
        "gpus": [],
        "cuda_kernels": None,
        "driver": None,
        "batch_invariance": None,
    }
    try:
        import torch

        facts["gpus"] = [_gpu_name(index) for index in range(torch.cuda.device_count())]
    except Exception:  # `software` has said it
        return facts
    facts["batch_invariance"] = "all kernels: tokens are bitwise the same whatever shares the batch"
    facts["cuda_kernels"] = _cuda_kernels(facts)
    try:
        from quire.platform.execution.device import choose

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            facts["in_use"] = str(choose("auto"))
    except ValueError as error:
        found.problems.append(Problem(f"The device cannot be used ({_line(error)}).", "Unset QUIRE_DEVICE.", True))
        return facts
    if facts["in_use"] != "cpu":
        facts["batch_invariance"] = (
            "all of quire's kernels, with exact products (the default); with --no-exact-products, cuBLAS multiplies, "
            "and last bits depend on the number of tokens in a step; a tower's convolution and attention are torch's"
        )
    elif facts["gpus"] and not os.environ.get("QUIRE_DEVICE"):
        what = f"{', '.join(facts['gpus'])}: not used ({_why_not()})."
        found.problems.append(Problem(what, "Reinstall quire where CUDA's compiler (nvcc) is, or go on with the CPU."))
    return facts


def _gpu_name(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name} (sm_{properties.major}{properties.minor}, {properties.total_memory / 1e9:.0f} GB)"


def _cuda_kernels(facts: dict[str, Any]) -> str | None:
    """For which GPUs they were compiled."""
    try:
        from quire.kernels import _cuda, cuda

        driver = _cuda.driver_version()
        facts["driver"] = f"for CUDA {cuda.version(driver)}" if driver else None
        return "sm_" + ", sm_".join(_cuda.architectures.split())
    except Exception:  # they were not built
        return None


def _why_not() -> str:
    try:
        import torch

        from quire.kernels import cuda_backend

        cuda_backend().check_device(torch.device("cuda", 0))
    except Exception as error:
        return _line(error)
    return "another device was asked for"


def _models(found: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {"bundled": None, "architectures": None}
    try:
        from quire.demo import model_path

        path = Path(model_path())
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"no config.json in {path}")
        facts["bundled"] = str(path)
    except Exception as error:
        found.problems.append(
            Problem(f"The bundled model is missing ({_line(error)}).", "Reinstall quire, or name a model.")
        )
    try:
        from quire.registry.listing import listing

        listed = listing()
        facts["architectures"] = len(listed)
        found.problems += [
            Problem(
                f"The plug-in for {row['architecture']} cannot be served ({row['problem']}).",
                "Mend or uninstall it.",
            )
            for row in listed
            if row["problem"]
        ]
    except Exception as error:
        found.problems.append(Problem(f"The registry cannot be read ({_line(error)}).", "Reinstall quire.", True))
    return facts


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_PROBES: dict[str, Callable[[Findings], dict[str, Any]]] = {
    "software": _software,
    "kernels": _kernels,
    "processor": _processor,
    "memory": _memory,
    "device": _device,
    "models": _models,
}
