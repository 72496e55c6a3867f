"""How a request names its adapter, or a mixture of several: vLLM's `LoRARequest`, and `adapters`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError

# Of an adapter in a mixture, of either sign: ordinary ones are about 1, and half precision ends at 65,504.
MAX_WEIGHT = 100.0


def name_fault(name: object) -> str | None:
    """Why an adapter may not be called so; None: it may.

    Names stand in URLs, where browsers and proxies take /./ and /../ away before anybody sees them, and in lines of
    logs and terminals.
    """
    if not isinstance(name, str) or not name:
        return "must be a non-empty string"
    if not name.isprintable() or name.isspace():
        return "must be of printable characters, and not of blanks alone: give it another name"
    if {".", ".."} & set(name.split("/")):
        return "no part between slashes may be . or .., as no URL could have it: give it another name"
    return None


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request runs with.

    lora_name: the name under which it is loaded (`name_fault` says what may be none); lora_path: a folder, or a .gguf
        file, from which it is loaded if it is not yet.
    lora_int_id: a number of the caller's for it, 1 or more, or None; a number stands for one name.
    base_model_name: what the adapter belongs to, for who reads it; nothing depends on it.
    load_inplace: load it anew under its name, from lora_path, although one of that name is loaded. `LLM` does so once a
        call; `LLMEngine.add_request` for each request.
    adapters: instead of one adapter, a mixture: (name, weight) of loaded ones. The result is that of PEFT's
        add_weighted_adapter(combination_type="cat"): every adapter's share, times its weight, is added to the base
        model's. Of these, each must be plain LoRA (no DoRA, biases, saved modules or trained tokens). Weights are from
        -MAX_WEIGHT to MAX_WEIGHT.

    lora_local_path: vLLM's older name of lora_path. long_lora_max_len, tensorizer_config_dict: of vLLM's; refused
    but for None. is_3d_lora_weight: of vLLM's; nothing depends on it, the file tells.

    Raises RequestError for what is none of these.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | None = None
    adapters: Sequence[tuple[str, float]] | None = None
    lora_local_path: str | None = field(default=None, kw_only=True, compare=False, repr=False)
    base_model_name: str | None = field(default=None, kw_only=True, compare=False)
    load_inplace: bool = field(default=False, kw_only=True)
    long_lora_max_len: int | None = field(default=None, kw_only=True, repr=False)
    tensorizer_config_dict: dict[str, Any] | None = field(default=None, kw_only=True, repr=False, compare=False)
    is_3d_lora_weight: bool = field(default=False, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if fault := name_fault(self.lora_name):
            raise RequestError(f"lora_name={self.lora_name!r:.200}: {fault}")
        number = self.lora_int_id
        if number is not None and (type(number) is not int or number < 1):
            raise RequestError(f"lora_int_id={number!r}: must be a whole number of at least 1")
        if self.lora_local_path is not None:
            object.__setattr__(self, "lora_local_path", str(self.lora_local_path))  # `replace` gives both
            if self.lora_path not in (None, "", self.lora_local_path):
                raise RequestError("lora_local_path is the older name of lora_path: give one of them")
            object.__setattr__(self, "lora_path", self.lora_local_path)
        if self.lora_path is not None:
            object.__setattr__(self, "lora_path", str(self.lora_path))
        self._check_vllms()
        if self.adapters is not None:
            self._check_mixture(self.adapters)

    def _check_vllms(self) -> None:
        """What vLLM's class has beside."""
        if self.base_model_name is not None and not isinstance(self.base_model_name, str):
            raise RequestError(f"base_model_name={self.base_model_name!r}: must be a string")
        if not isinstance(self.load_inplace, bool):
            raise RequestError(f"load_inplace={self.load_inplace!r}: must be True or False")
        if self.load_inplace and self.lora_path is None:
            raise RequestError("load_inplace=True needs lora_path: the folder that is loaded")
        if self.long_lora_max_len is not None:
            raise RequestError("long_lora_max_len: adapters that stretch the context are not served")
        if self.tensorizer_config_dict is not None:
            raise RequestError("tensorizer_config_dict: adapters are read from safetensors files")
        if not isinstance(self.is_3d_lora_weight, bool):
            raise RequestError(f"is_3d_lora_weight={self.is_3d_lora_weight!r}: must be True or False")

    @property
    def adapter_id(self) -> int | None:
        """vLLM's other name of lora_int_id."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """vLLM's other name of lora_name."""
        return self.lora_name

    @property
    def path(self) -> str | None:
        """vLLM's other name of lora_path."""
        return self.lora_path

    def _check_mixture(self, adapters: Sequence[tuple[str, float]]) -> None:
        if self.lora_path is not None:
            raise RequestError(f"LoRARequest {self.lora_name!r}: takes lora_path or adapters, not both")
        if isinstance(adapters, str) or not isinstance(adapters, Sequence) or not adapters:
            raise RequestError(f"adapters={adapters!r}: must be a list of (name, weight)")
        for place, pair in enumerate(adapters):
            good = isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str)
            if not good or type(pair[1]) not in (int, float):
                raise RequestError(f"adapters[{place}]: it is no (name, weight)")
            if not abs(pair[1]) <= MAX_WEIGHT:  # false for NaN
                weight = "of over 300 digits" if type(pair[1]) is int and abs(pair[1]) > 10**300 else f"{pair[1]!r}"
                limits = f"{-MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
                raise RequestError(f"adapters: {pair[0]!r:.200} has the weight {weight}, and weights are from {limits}")
        names = [name for name, _ in adapters]
        if len(set(names)) != len(names):
            raise RequestError(f"adapters={names}: each may be named once; add the weights")
        object.__setattr__(self, "adapters", tuple((name, float(weight)) for name, weight in adapters))
