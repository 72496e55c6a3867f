"""What a stage of a pipeline hands to the next one: the residual stream of a step's tokens, and what is still to be
added to it. They are messages of torch.distributed (gloo), one a step, with a header in front.

Sending is no kernel's call. It is an operation of torch's, so that a step that is recorded does it again between
kernels (`operations.py`).
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from quire.kernels.exchange import ExchangeError

_HEADER_BYTES = 64  # number of the step, bytes behind the header, whether the stage has failed, as int64; then nothing
_MOST_UNDER_WAY = 2  # messages that are kept until the next stage has taken them


class StageError(RuntimeError):
    """A stage before this one has failed in the step, and tells why itself."""


class Pipe:
    """One stage's ends. A step receives once, unless the stage is the first, and sends once, unless it is the last.

    group: a `ProcessGroup` of gloo of the stages, by their numbers.
    """

    def __init__(self, group: Any, stage: int, stages: int) -> None:
        self._group = group
        self._stage, self._stages = stage, stages
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._step = 0
        self._received = self._sent = False
        self._number = next(_numbers)
        _pipes[self._number] = self

    def begin(self) -> None:
        """A step begins."""
        self._step += 1
        self._received, self._sent = self._stage == 0, self._stage == self._stages - 1

    def fail(self, most_bytes: int) -> None:
        """The step that has begun has failed here: take what comes, and tell the next stage. most_bytes: that come.

        Raises ExchangeError where a stage is gone."""
        try:
            if not self._received:
                self._take(torch.empty(_HEADER_BYTES + most_bytes, dtype=torch.uint8))
        except StageError:
            pass
        if not self._sent:
            self._send(self._message(0, failed=True))

    def receive(self, residual: torch.Tensor) -> torch.Tensor:
        """Write the stage before's residual stream to residual [T, C], and return what is to be added to it, [T, C].

        Raises StageError where that stage has failed, ExchangeError where it is gone or in another step.
        """
        x = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        torch.ops.quire.pipe_receive(residual, x, self._number)
        return x

    def send(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Hand both, [T, C], to the next stage. Raises ExchangeError where it is gone."""
        torch.ops.quire.pipe_send(residual, x, self._number)

    def least(self, number: int) -> int:
        """The least of the stages' numbers; all of them ask."""
        return min(int(one) for one in self.gather(torch.tensor([number])))

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every stage's tensor, all of one shape; all of them ask."""
        all_of_them = [torch.empty_like(own) for _ in range(self._stages)]
        self._wait(self._group.allgather([all_of_them], [own]))
        return all_of_them

    def _receive_into(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        size = residual.numel() * residual.element_size()
        message = torch.empty(_HEADER_BYTES + 2 * size, dtype=torch.uint8)
        if self._take(message) != 2 * size:
            raise ExchangeError("the stage before this one is in a step of another shape")
        residual.copy_(message[_HEADER_BYTES : _HEADER_BYTES + size].view(residual.dtype).view(residual.shape))
        x.copy_(message[_HEADER_BYTES + size :].view(x.dtype).view(x.shape))

    def _take(self, message: torch.Tensor) -> int:
        """Receive into `message`, which may be longer; returns the bytes that came behind the header."""
        self._received = True
        self._wait(self._group.recv([message], self._stage - 1, 0))
        step, size, failed = message[:_HEADER_BYTES].view(torch.int64)[:3].tolist()
        if step != self._step:
            raise ExchangeError(f"the stage before this one is in step {step}, and this one in {self._step}")
        if failed:
            raise StageError("a stage before this one has failed")
        return int(size)

    def _send_both(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        size = residual.numel() * residual.element_size()
        message = self._message(2 * size)
        message[_HEADER_BYTES : _HEADER_BYTES + size].view(residual.dtype).view(residual.shape).copy_(residual)
        message[_HEADER_BYTES + size :].view(x.dtype).view(x.shape).copy_(x)
        self._send(message)

    def _message(self, size: int, failed: bool = False) -> torch.Tensor:
        message = torch.empty(_HEADER_BYTES + size, dtype=torch.uint8)
        message[:_HEADER_BYTES].view(torch.int64)[:3] = torch.tensor([self._step, size, int(failed)])
        return message

    def _send(self, message: torch.Tensor) -> None:
        """Nobody waits for it to arrive, unless several have not."""
        self._sent = True
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._wait(self._under_way.popleft()[0])  # before that, gloo does not tell whether it was taken
        try:
            self._under_way.append((self._group.send([message], self._stage + 1, 0), message))
        except RuntimeError as error:  # torch has no narrower one
            raise ExchangeError(f"another stage of the pipeline is gone: {error}") from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeError(f"another stage of the pipeline is gone: {error}") from error


_numbers = count()
_pipes: WeakValueDictionary[int, Pipe] = WeakValueDictionary()  # operations' arguments are plain

# Both are said to write, as a recording leaves out what does nothing.
_library = torch.library.Library("quire", "FRAGMENT")
_library.define("pipe_receive(Tensor(a!) residual, Tensor(b!) x, int pipe) -> ()")
_library.define("pipe_send(Tensor(a!) residual, Tensor(b!) x, int pipe) -> ()")


def _pipe_receive(residual: torch.Tensor, x: torch.Tensor, pipe: int) -> None:
    _pipes[pipe]._receive_into(residual, x)


def _pipe_send(residual: torch.Tensor, x: torch.Tensor, pipe: int) -> None:
    _pipes[pipe]._send_both(residual, x)


_library.impl("pipe_receive", _pipe_receive, "CompositeExplicitAutograd")
_library.impl("pipe_send", _pipe_send, "CompositeExplicitAutograd")
