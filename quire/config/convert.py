"""What callers give for a setting, in its accepted forms -> what its field holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import QuireError, RequestError

GIB = 1 << 30


def text(given: Any) -> str:
    """A path, as text."""
    return str(given)


def dtype(given: Any) -> Any:
    """A torch dtype by its name."""
    name = str(given)
    return name.removeprefix("torch.") if name.startswith("torch.") else given


def length(given: Any) -> Any:
    """-1 and "auto": vLLM's ways of leaving it open."""
    return None if given in (-1, "auto") else given


def token(given: Any) -> Any:
    """The word true: the token that is stored."""
    return True if str(given).lower() == "true" else given


def folder(given: Any) -> Any:
    """An empty text names none."""
    return given or None


def gibibytes(given: Any) -> int:
    """GiB -> bytes."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < 1 << 20:
        raise RequestError(f"swap_space={given!r}: must be a number of GiB, 0 or more.")
    return int(given * GIB)


def hosts(names: Any) -> tuple[str, ...]:
    """Names of hosts."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"allowed_media_domains={names!r}: must be a list of host names.")
    return tuple(names)


def folders(paths: Any) -> tuple[str, ...]:
    """Paths of folders."""
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
        raise RequestError(f"lora_roots={paths!r}: must be a list of folders.")
    return tuple(str(path) for path in paths)


def processors(names: Any) -> tuple[str | type, ...]:
    """Names of logits processors, or their classes."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, (str, type)) for n in names):
        raise RequestError(f"logits_processors={names!r}: must be a list of names, or of classes.")
    return tuple(names)


def image_limit(limits: Any) -> Any:
    """{"image": 4}, or as vLLM also has it {"image": {"count": 4, ...}}; other media may be limited to none."""
    others = set(limits) - {"image"} if isinstance(limits, Mapping) else {None}
    if None in others or any(limits[name] != 0 for name in others):
        raise RequestError(f"limit_mm_per_prompt={limits!r}: must be {{'image': a number}}; no other media are served.")
    images = limits.get("image")
    if isinstance(images, Mapping):
        if set(images) - {"count", "width", "height"}:  # how large the made-up ones are that vLLM measures memory with
            raise RequestError(f"limit_mm_per_prompt: 'image' has a count, not {sorted(images)}.")
        images = images.get("count")
    return images


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """A file's text, or the text itself where it is a template. Raises QuireError for a file that cannot be read."""
    if chat_template is None or "{" in str(chat_template):
        return chat_template if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"chat_template {chat_template}: cannot be read ({error}).") from None
