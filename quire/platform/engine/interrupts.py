"""Keeping Ctrl-C until the engine's tables are whole again."""

from __future__ import annotations

import signal
import threading

# What signal's own functions call, which first look for an enum's member for each handler: 25 us a step.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType

_SIGINT = int(signal.SIGINT)


class HeldInterrupt:
    """Within this context SIGINT only sets `pressed`. One that nobody took is delivered on leaving; a second, at once.

    Elsewhere than in the main thread, which alone gets signals, it does nothing; nor where SIGINT is ignored, as in a
    shell's background jobs, or belongs to somebody who is not Python.
    """

    pressed = False
    _holders = 0  # in the main thread, one within the other

    @classmethod
    def unless_held(cls) -> AbstractContextManager[object]:
        """One for a few microseconds of each step: where somebody else holds interrupts already, it costs nothing."""
        held = cls._holders or threading.current_thread() is not threading.main_thread()
        return nullcontext() if held else cls()

    def __enter__(self) -> HeldInterrupt:
        self._before = getsignal(_SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = is_main and self._before not in (signal.SIG_IGN, None)
        if self._holds:
            HeldInterrupt._holders += 1
            set_handler(_SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            HeldInterrupt._holders -= 1
            set_handler(_SIGINT, self._before)
        if self.pressed and error is None:
            signal.raise_signal(signal.SIGINT)

    def take(self) -> bool:
        """Whether there was an interrupt; the caller answers it, so it is not delivered."""
        pressed, self.pressed = self.pressed, False
        return pressed

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
