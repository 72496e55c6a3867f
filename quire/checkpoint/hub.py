"""Single files of the hub: a GGUF model, by the name of its file or of how it is quantized."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import CheckpointError

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+):([^:\\]+)")
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class Hub:
    """How files come from the hub: the folder that they are kept in, and the token; None: huggingface_hub's own."""

    folder: str | None = None
    token: bool | str | None = field(default=None, repr=False)


def is_gguf_of_hub(name: str) -> bool:
    """Whether it is owner/repository:file.gguf, or owner/repository:Q4_K_M."""
    return bool(_NAMED.fullmatch(name))


def fetch_gguf(name: str, revision: str | None, hub: Hub) -> Path:
    """The file of a model, with all parts of a split one beside it, fetched once. Raises CheckpointError."""
    found = _NAMED.fullmatch(name)
    assert found is not None
    repository, wanted = found.groups()
    import huggingface_hub

    cache = os.path.expanduser(hub.folder) if hub.folder else None
    try:
        files = _files(repository, wanted, revision, cache, hub)
        chosen = choose(files, wanted, name)
        paths = [
            huggingface_hub.hf_hub_download(repository, one, revision=revision, cache_dir=cache, token=hub.token)
            for one in chosen
        ]
    except CheckpointError:
        raise
    except Exception as error:  # the hub's, the network's or the disk's
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{name!r}{at}: not to be had from the Hugging Face hub: {type(error).__name__}: {error}"
        ) from error
    return Path(paths[0])


def _files(repository: str, wanted: str, revision: str | None, cache: str | None, hub: Hub) -> Sequence[str]:
    """The repository's files; offline, those that are here. One file needs no list."""
    import huggingface_hub

    if wanted.lower().endswith(".gguf") and not _PART.fullmatch(wanted):
        return [wanted]
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        listed: Sequence[str] = huggingface_hub.HfApi(token=hub.token).list_repo_files(repository, revision=revision)
        return listed
    folder = Path(
        huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=["*.gguf"], cache_dir=cache, local_files_only=True
        )
    )
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]


def choose(files: Sequence[str], wanted: str, name: str) -> list[str]:
    """Of a repository's files, those of one model: the named one, with its parts, or the one that is quantized so.

    Raises CheckpointError, which lists what there is.
    """
    models = sorted(one for one in files if one.lower().endswith(".gguf") and not _base(one).startswith("mmproj"))
    part = _PART.fullmatch(wanted)
    if wanted.lower().endswith(".gguf"):
        same = [one for one in models if one == wanted or (part and _stem(one) == part[1])]
    else:
        tag = re.compile(rf"(.*[-._/])?{re.escape(wanted)}([-._/].*)?\.gguf", re.IGNORECASE)
        same = [one for one in models if tag.fullmatch(one)]
    if len({_stem(one) for one in same}) == 1:
        return same
    there = ", ".join(models[:20]) or "none"
    what = "several files are" if same else "no file is"
    raise CheckpointError(f"{name!r}: {what} called so; its GGUF files: {there}. Give one by its name.")


def _base(file: str) -> str:
    return file.rpartition("/")[2]


def _stem(file: str) -> str:
    part = _PART.fullmatch(file)
    return part[1] if part else file
