"""What callers give for a setting, in its accepted forms -> what its field holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import QuireError, RequestError

GIB = 1 << 30
MOST_MEDIA = {"image": 64, "video": 8, "audio": 8}  # of a prompt


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


def fields_given(given: Any) -> Any:
    """An object's fields that are not None, as vLLM's PoolerConfig has them; a dict as it is."""
    if given is None or isinstance(given, Mapping):
        return {} if given is None else dict(given)
    return (
        {name: value for name, value in vars(given).items() if value is not None}
        if hasattr(given, "__dict__")
        else given
    )


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


def media_limits(limits: Any) -> Any:
    """{"image": 4}, or as vLLM also has it {"image": {"count": 4, ...}}, for each kind."""
    if not isinstance(limits, Mapping) or set(limits) - {"image", "video", "audio"}:
        raise RequestError(f"limit_mm_per_prompt={limits!r}: must be {{'image': a number}}, or 'video' or 'audio'.")
    found = dict(MOST_MEDIA)
    for kind, given in limits.items():
        if isinstance(given, Mapping):
            # How large the made-up ones are that vLLM measures memory with.
            if set(given) - {"count", "width", "height", "num_frames", "length"}:
                raise RequestError(f"limit_mm_per_prompt: {kind!r} has a count, not {sorted(given)}.")
            given = given.get("count")
        if given is None:
            continue
        if type(given) is not int or given < 0:
            raise RequestError(f"limit_mm_per_prompt: {kind}={given!r} must be a number, 0 or more.")
        found[kind] = given
    return found


def media_io(given: Any) -> Any:
    """{"video": {"num_frames": 32}}, or fps; -1, which vLLM takes for all, is `do_sample_frames` false."""
    if not isinstance(given, Mapping) or any(
        name != "video" or not isinstance(own, Mapping) or not set(own) <= {"num_frames", "fps"}
        for name, own in given.items()
    ):
        raise RequestError(f"media_io_kwargs={given!r}: must be {{'video': {{'num_frames': a number}}}}, or 'fps'.")
    found = dict(given.get("video") or {})
    every = -1 in found.values()
    own = {name: value for name, value in found.items() if value != -1}
    return {"video": own or ({"do_sample_frames": False} if every else {})}


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """A file's text, or the text itself where it is a template. Raises QuireError for a file that cannot be read."""
    if chat_template is None or "{" in str(chat_template):
        return chat_template if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"chat_template {chat_template}: cannot be read ({error}).") from None
