"""How a request names its adapter, or a mixture of several: vLLM's `LoRARequest`, and `adapters`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import RequestError


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request runs with.

    lora_name: the name under which it is loaded; lora_path: a folder from which it is loaded if it is not yet.
    lora_int_id: a number of the caller's for it, 1 or more, or None; a number stands for one name.
    adapters: instead of one adapter, a mixture: (name, weight) of loaded ones. The result is that of PEFT's
        add_weighted_adapter(combination_type="cat"): every adapter's share, times its weight, is added to the base
        model's. Of these, each must be plain LoRA (no DoRA, biases, saved modules or trained tokens).

    Raises RequestError for what is none of these.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | None = None
    adapters: Sequence[tuple[str, float]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={self.lora_name!r}: must be a non-empty string")
        number = self.lora_int_id
        if number is not None and (type(number) is not int or number < 1):
            raise RequestError(f"lora_int_id={number!r}: must be a whole number of at least 1")
        if self.lora_path is not None:
            object.__setattr__(self, "lora_path", str(self.lora_path))
        if self.adapters is not None:
            self._check_mixture(self.adapters)

    def _check_mixture(self, adapters: Sequence[tuple[str, float]]) -> None:
        if self.lora_path is not None:
            raise RequestError(f"LoRARequest {self.lora_name!r}: takes lora_path or adapters, not both")
        if isinstance(adapters, str) or not isinstance(adapters, Sequence) or not adapters:
            raise RequestError(f"adapters={adapters!r}: must be a list of (name, weight)")
        for pair in adapters:
            good = isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str)
            if not good or type(pair[1]) not in (int, float) or not abs(pair[1]) <= sys.float_info.max:
                raise RequestError(f"adapters: {pair!r} is no (name, finite weight)")
        names = [name for name, _ in adapters]
        if len(set(names)) != len(names):
            raise RequestError(f"adapters={names}: each may be named once; add the weights")
        object.__setattr__(self, "adapters", tuple((name, float(weight)) for name, weight in adapters))
