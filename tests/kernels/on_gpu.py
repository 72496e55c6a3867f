"""`quire.kernels.cuda` on a GPU, for tests whose tensors lie on the CPU: arguments go there, results come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from quire.kernels import sampling
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.experts import ExpertWeights
from quire.kernels.quantized import QuantizedWeight

GPU = torch.device("cuda", 0)


class OnGpu:
    """Each function of the module, on copies of its arguments; what it changed in place is copied back."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return call_there(value) if callable(value) else value


def call_there(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        moved = _Moved()
        result = function(*map(moved.there, arguments), **{name: moved.there(value) for name, value in named.items()})
        torch.cuda.synchronize()
        moved.copy_back()
        return result.cpu() if isinstance(result, torch.Tensor) else result

    return called


class _Moved:
    def __init__(self) -> None:
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_meta else self._tensor(value)
        if isinstance(value, QuantizedWeight):
            return QuantizedWeight(self.there(value.data), value.layout, self.there(value.aux))
        if isinstance(value, LoraTable):
            return self._table(value)
        if isinstance(value, ExpertWeights):
            return ExpertWeights(self.there(value.weights), self.there(value.biases))
        if isinstance(value, LoraSegments):
            segments = LoraSegments(len(value.entries), value.num_rows, GPU, value.layers)  # not more room than it has
            segments.fill(value.rows)
            return segments
        return type(value)(map(self.there, value)) if isinstance(value, (list, tuple)) else value

    def copy_back(self) -> None:
        for here, there in self._memory.values():
            here.copy_(there)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Strides, alignment and what lies around it stay the same; tensors that share memory share it there."""
        here = tensor.untyped_storage()
        if here.data_ptr() not in self._memory:
            self._memory[here.data_ptr()] = here, here.cuda()
        there = self._memory[here.data_ptr()][1]
        moved = torch.empty(0, dtype=tensor.dtype, device=GPU)
        return moved.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _table(self, table: LoraTable) -> LoraTable:
        slots = len(table.entries)
        moved = LoraTable(table.in_features, table.out_features, table.dtype, slots, GPU, table.row_major)
        for slot in range(slots):
            weights = table.get(slot)
            if weights is not None:
                moved.put(slot, weights.for_device(table.out_features, GPU, table.row_major))
        return moved


@cache
def load() -> Any:
    """Fails, and does not skip, where there is no GPU or the kernels were not built."""
    from quire.kernels import cuda

    assert torch.cuda.is_available() and cuda.DEVICE == "cuda", "tests marked gpu need a GPU"
    sampling.draw_tokens = call_there(sampling.draw_tokens)  # type: ignore[assignment]
    return OnGpu(cuda)
