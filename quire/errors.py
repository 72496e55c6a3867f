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


class WorkerDiedError(RuntimeError):
    """What computes steps has ended, hangs, or has lost a plan: the engine can serve nothing any more."""


class RequestError(QuireError):
    """A request cannot be served as given: its prompt or its sampling parameters are out of bounds."""


class UnknownAdapterError(AdapterError, RequestError):
    """No adapter is loaded by this name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class ContextLengthError(RequestError):
    """A prompt that the model's context has no room for, in OpenAI's words: clients look for them.

    limit, tokens: that there may be of prompt and answer, and that the prompt has (at_least: or more). field: what the
    request calls its prompt. why: of the limit, if it is not the model's own. hint: the end of the last sentence.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        limit: int,
        tokens: int,
        *,
        field: str = "prompt",
        request_id: str | None = None,
        at_least: bool = False,
        why: str = "",
        hint: str = "",
    ) -> None:
        said = "" if request_id is None else f"request {request_id}: "
        more = ", and an answer needs one more" if tokens == limit else ""
        super().__init__(
            f"{said}This model's maximum context length is {limit} tokens{why}. However, your {field} resulted in "
            f"{'at least ' * at_least}{tokens} tokens{more}. Please reduce the length of the {field}{hint or '.'}"
        )
        self.field = field
        self._rest = {"limit": limit, "tokens": tokens, "at_least": at_least, "why": why, "hint": hint}

    def about(self, field: str) -> ContextLengthError:
        """The same for a caller who calls the prompt something else, and knows which request it is."""
        return ContextLengthError(field=field, **self._rest)  # type: ignore[arg-type]


class OverloadedError(QuireError):
    """The queue is full: try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SleepingError(QuireError):
    """The engine's weights are not in memory: `wake_up` first."""


class EngineClosedError(RuntimeError):
    """The engine takes no requests any more: it is shutting down, or it has failed."""


class NoRoomError(RequestError):
    """A prompt's images take more tokens, up to the one called `name`, than there is room for."""

    def __init__(self, name: str, tokens: int, room: int) -> None:
        super().__init__(
            f"{name}: the prompt's images take {tokens} tokens up to this one, and max_model_len leaves room "
            f"for {room}: use fewer or smaller ones"
        )
        self.tokens = tokens
        self.room = room
