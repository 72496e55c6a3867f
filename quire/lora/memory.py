"""Versions of adapters, and which of them main memory has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire import paths
from quire.config import LoRAConfig
from quire.errors import AdapterError, OutsideRootsError, RequestError
from quire.lora.adapter import LoadedAdapter
from quire.lora.gguf import is_gguf
from quire.types import AdapterRef, AdapterUse


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded. modules: layers that it changes; ranks: of their LoRA; bytes: in memory. What its files had and
    said is as `Bound` has it: tensors, targets, alphas, scalings, base_model.
    """

    name: str
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    seconds: float
    tensors: int
    targets: Mapping[str, int]
    alphas: tuple[float, ...]
    scalings: tuple[float, ...]
    base_model: str | None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter. tier: "device" (steps can use it), "host" (in main memory) or "disk" (read when needed).

    requests: unfinished ones that hold this version.
    """

    name: str
    lora_int_id: int | None
    path: str
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    tier: Literal["device", "host", "disk"]
    pinned: bool
    requests: int


@dataclass(eq=False)
class AdapterVersion:
    """A version of an adapter, and where its weights are.

    source: what its path was called. adapter: its weights, while they are in main memory. users: requests that hold it.
    resident: on the device, so that its weights must stay. fetching: being read. retired: without a name. stamp: larger
    ones were used later. gone: called when nobody can want its files any more.
    """

    ref: AdapterRef
    path: Path
    source: str | None
    report: LoadReport
    int_id: int | None
    mixable: bool
    adapter: LoadedAdapter | None = None
    users: int = 0
    resident: bool = False
    fetching: bool = False
    retired: bool = False
    pinned: bool = False
    stamp: int = 0
    error: str | None = None
    gone: Callable[[], object] | None = None

    @property
    def size(self) -> int:
        return self.report.bytes

    @property
    def takes_memory(self) -> bool:
        return self.adapter is not None or self.fetching

    def info(self) -> AdapterInfo:
        tier: Literal["device", "host", "disk"] = "device" if self.resident else "host" if self.adapter else "disk"
        report = self.report
        return AdapterInfo(
            self.ref.name, self.int_id, str(self.path), report.modules, report.ranks, report.bytes, tier, self.pinned,
            self.users,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A version that was read and checked, and that no name stands for. replace: its name may be taken."""

    version: AdapterVersion
    adapter: LoadedAdapter
    replace: bool


class HostMemory:
    """The budget of main memory over all versions. Its methods are called under the registry's lock."""

    def __init__(self, config: LoRAConfig, versions: Mapping[int, AdapterVersion]) -> None:
        self._config = config
        self._versions = versions

    @property
    def bytes(self) -> int:
        """What weights take, those that are being read among them."""
        return sum(version.size for version in self._versions.values() if version.takes_memory)

    def fits(self, versions: Collection[AdapterVersion]) -> bool:
        """Whether all of these may be there at once."""
        most = min(self._config.host_bytes, self._config.device_bytes)
        return sum(v.size for v in versions) <= most and len(versions) <= (self._config.max_cpu_loras or len(versions))

    def check(
        self,
        version: AdapterVersion,
        pinned: bool,
        old: AdapterVersion | None,
        mixtures: Iterable[Collection[AdapterVersion]],
    ) -> None:
        """Every adapter, and every mixture that is in use, must find room beside those that are pinned.

        old: the version in whose place this one comes. Raises AdapterError.
        """
        kept = {v for v in self._versions.values() if v.pinned and v is not old}
        together = [{version}]
        if pinned:
            together += [{v, version} for v in self._versions.values() if v is not old or v.users]
            together += [{version, *mixture} for mixture in mixtures]
        if not all(self.fits(kept | group) for group in together):
            raise AdapterError(
                f"adapter {version.ref.name!r} takes {version.size:,} bytes beside {sum(v.size for v in kept):,} of "
                f"pinned ones, and that leaves no room for all others: {self.limits()}. Raise these, or pin less."
            )

    def check_mixture(self, versions: Collection[AdapterVersion], pinned: Iterable[AdapterVersion]) -> None:
        """Versions that a request mixes must be plain LoRA, and find room together. Raises RequestError."""
        for version in versions:
            if not version.mixable:
                raise RequestError(
                    f"adapter {version.ref.name!r} is more than plain LoRA (DoRA, biases, saved modules or trained "
                    "tokens) and cannot be part of a mixture"
                )
        kept = list(pinned)
        if not self.fits({*versions, *kept}) or len(versions) > (self._config.max_loras or len(versions)):
            raise RequestError(
                f"the mixture takes {sum(version.size for version in versions):,} bytes and {len(versions)} adapters, "
                f"and finds no room ({self.limits()}; {len(kept)} adapters are pinned)"
            )

    def make_room(self, version: AdapterVersion, urgent: bool) -> bool:
        """Drop weights that nobody needs until one more version fits.

        urgent: those too that other requests wait for, at last even those of versions without a name, whose files may
        hold another by now.
        """
        there = [v for v in self._versions.values() if v.takes_memory]
        free = self._config.host_bytes - sum(v.size for v in there)
        slots = (self._config.max_cpu_loras or len(there) + 1) - len(there)
        victims = [v for v in there if not (v.resident or v.pinned or v.fetching) and (urgent or not v.users)]
        victims.sort(key=lambda v: (v.users > 0 and v.retired, v.users > 0, v.stamp))
        chosen = []
        for victim in victims:
            if free >= version.size and slots >= 1:
                break
            chosen.append(victim)
            free, slots = free + victim.size, slots + 1
        if free < version.size or slots < 1:
            return False
        for victim in chosen:
            victim.adapter = None
        return True

    def limits(self) -> str:
        """The settings that bound memory, for messages."""
        config = self._config
        limits = {"lora_device_bytes": config.device_bytes, "lora_host_bytes": config.host_bytes,
                  "max_loras": config.max_loras, "max_cpu_loras": config.max_cpu_loras}  # fmt: skip
        return ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)


def check_versions(
    versions: Mapping[int, AdapterVersion], names: Mapping[str, AdapterVersion], holders: Iterable[AdapterUse]
) -> None:
    """Raise AssertionError unless versions (by uid), names and what all requests hold agree."""
    held = Counter(ref.uid for use in holders for ref, _ in use)
    for uid, version in versions.items():
        if version.users != held[uid]:
            raise AssertionError(f"adapter {version.ref}: {version.users} users, {held[uid]} holders")
        if version.retired == (names.get(version.ref.name) is version):
            raise AssertionError(f"adapter {version.ref}: retired, or nameless")
        if version.retired and not version.users and not version.resident:
            raise AssertionError(f"adapter {version.ref}: nobody holds it, and it is still here")
        if version.resident and version.adapter is None:
            raise AssertionError(f"adapter {version.ref}: resident without weights")
    if set(held) - set(versions):
        raise AssertionError("a request holds an adapter that is gone")


def allowed_folder(path: Path, roots: Collection[str] | None) -> Path:
    """The folder, or the GGUF file, with links resolved. Raises AdapterError where it lies outside `roots`, or is
    neither."""
    try:
        path = Path(path).expanduser()
        resolved = path.resolve() if roots is None else paths.resolve(path)
        inside = roots is None or _is_inside(resolved, roots)
        found, fits = resolved.exists(), resolved.is_dir() or is_gguf(resolved)
    except paths.KernelPathError:
        inside = found = fits = False
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{path}: there is no such folder ({type(error).__name__}).") from None
    if not inside:  # first: nothing is said of what lies there
        raise OutsideRootsError(f"{path}: lies outside the folders that adapters may be read from.")
    if not found:
        raise AdapterError(f"{path}: there is no such folder.")
    if not fits:
        raise AdapterError(f"{path}: is no folder; give the one that holds adapter_config.json, or a .gguf file.")
    return resolved


def _is_inside(folder: Path, roots: Collection[str]) -> bool:
    """Whether it lies in one of these folders, and so do a folder's files, wherever their links lead."""
    bases = [Path(root).expanduser().resolve() for root in roots]
    files = [folder, *(paths.resolve(file) for file in folder.glob("adapter_*"))]
    return all(any(file.is_relative_to(base) for base in bases) for file in files)
