"""What files of an upload may be called, and which of them an adapter is."""

from __future__ import annotations

from quire.lora import CONFIG_FILE, WEIGHTS_FILE
from quire.server.responses.errors import ApiError

KEPT = (CONFIG_FILE, WEIGHTS_FILE)
MOST_FILES = 64
_LONGEST = 1024  # characters
_SHOWN = 200
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
# What PEFT and trainers write beside an adapter. Nothing depends on these: they are not stored.
_BESIDE = frozenset({
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", ".gitattributes", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "trainer_state.json", "all_results.json",
    "train_results.json", "eval_results.json",
})  # fmt: skip


class FileNames:
    """The names of an upload's files so far: of one folder, each once, and no more than 64."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._folder: str | None = None
        self.ignored: list[str] = []

    def take(self, path: str) -> str | None:
        """Which of an adapter's files this is; None: one beside it. Raises ApiError for what has no place here.

        path: a file's, with the name of one folder before it, or without.
        """
        if len(self._seen) >= MOST_FILES:
            raise ApiError(400, f"files: there are more than {MOST_FILES}.", "files")
        if path in self._seen:
            raise ApiError(400, f"files: {path[:_SHOWN]!r} is there twice.", "files")
        self._seen.add(path)
        folder, name = _split(path)
        if name not in KEPT:
            self.ignored.append(path)
            return None
        if self._folder not in (None, folder):
            raise ApiError(400, f"files: {KEPT[0]} and {KEPT[1]} must be in one folder.", "files")
        self._folder = folder
        return name


def check_path(path: str, most: int) -> list[str]:
    """The parts of a relative path, of which there may be so many; none of macOS's own. Raises ApiError."""
    shown = repr(path[:_SHOWN])
    parts = path.split("/")
    if len(path) > _LONGEST or not path.isprintable() or "\\" in path or path[1:2] == ":":
        raise ApiError(400, f"files: {shown} is no name that a file of an adapter may have.", "files")
    if any(part in ("", ".", "..") for part in parts):
        raise ApiError(400, f"files: {shown} is no plain relative path.", "files")
    if parts[0] == "__MACOSX" or parts[-1] == ".DS_Store":  # which its archives have
        return []
    if len(parts) > most:
        raise ApiError(400, f"files: {shown} lies in a folder within a folder: send the adapter's own folder.", "files")
    return parts


def _split(path: str) -> tuple[str, str]:
    """(folder, file's name); no name for what is nobody's. Raises ApiError."""
    shown = repr(path[:_SHOWN])
    parts = check_path(path, 2)
    if not parts:
        return "", ""
    name = parts[-1]
    if name.lower().endswith(_PICKLES):
        raise ApiError(
            400,
            f"files: {shown} may be a pickle, which can run code and is never taken: send safetensors, and leave it "
            "out.",
            "files",
        )
    if name not in KEPT and name not in _BESIDE:
        raise ApiError(
            400, f"files: {shown} is no file of an adapter: send {KEPT[0]} and {KEPT[1]}, or a .zip with both.", "files"
        )
    return parts[0] if len(parts) == 2 else "", name
