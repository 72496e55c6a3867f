"""The errors that quire raises for what a caller can mend. Each names the thing, the limit and the way out."""

from __future__ import annotations


class QuireError(ValueError):
    """Base of every error that is caused by what the caller gave: a model, a prompt, a parameter."""


class UnsupportedModelError(QuireError):
    """The checkpoint's architecture (or a part of its configuration) is not served."""


class CheckpointError(QuireError):
    """The checkpoint's files are missing, damaged, or do not fit the architecture."""


class AdapterError(QuireError):
    """A LoRA adapter's files are missing, damaged, or do not fit the model; or its name or path is not to be had."""


class OutsideRootsError(AdapterError):
    """An adapter's path leads out of the folders that adapters may be read from."""


class RequestError(QuireError):
    """A request cannot be served as given: its prompt or its sampling parameters are out of bounds."""


class OverloadedError(QuireError):
    """The queue is full: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(RuntimeError):
    """The engine takes no requests any more: it is shutting down, or it has failed."""
