"""Logs to standard error: lines for people, or JSON for machines. No prompt, no answer and no key is ever logged."""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from typing import Any

# What a LogRecord has of itself; the rest was given with extra=...
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}

_LEVELS = {"trace": logging.DEBUG}  # uvicorn's, that Python does not have


class _Lines(logging.Formatter):
    """One line each, with its facts as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _iso(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = {name: value for name, value in vars(record).items() if name not in _OWN and value is not None}
        return " ".join([super().formatMessage(record), *(f"{name}={_shown(value)}" for name, value in facts.items())])


def _iso(record: logging.LogRecord) -> str:
    """When it was, by ISO 8601, in this place's time and with its distance from UTC."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def configure(as_json: bool, level: str, access_level: str | None = None) -> None:
    """Let quire's and asyncio's loggers write to standard error.

    access_level: of the lines about requests, which uvicorn writes in vLLM; None: as the others.
    """
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        from pythonjsonlogger.json import JsonFormatter

        class Objects(JsonFormatter):
            def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
                return _iso(record)

        handler.setFormatter(Objects("%(asctime)s %(levelname)s %(name)s %(message)s", json_ensure_ascii=False))
    else:
        handler.setFormatter(_Lines())
    for name in ("quire", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    access = logging.getLogger("quire.server.access")
    access.setLevel(logging.NOTSET if access_level is None else _LEVELS.get(access_level, access_level.upper()))
