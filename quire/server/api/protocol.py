"""uvicorn's HTTP protocol, with a limit for headers: connections that never finish one are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 64 << 10  # bytes before a header's end


def limited_protocol(header_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol whose clients have so many seconds, from the connection or the request's first byte on."""

    class LimitedProtocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._begin()

        def data_received(self, data: bytes) -> None:
            if self._timer is not None:
                self._header_bytes += len(data)
            super().data_received(data)
            if self._timer is not None and self._header_bytes > _MOST:
                self._end()
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._timer is None:
                self._begin()

        def on_headers_complete(self) -> None:
            self._end()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            super().connection_lost(exc)

        def _begin(self) -> None:
            self._header_bytes = 0
            self._timer = self.loop.call_later(header_timeout, self._too_late)

        def _end(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_late(self) -> None:
            self._timer = None
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol
