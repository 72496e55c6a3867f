"""The words in which `ops.py` and `row_ops.py` write the table of kernels: what a row says of tensors, and the row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

TABLE: dict[str, Op] = {}  # the rows, by name; `ops.py` and `row_ops.py` enter them


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a kernel expects of a tensor.

    shape: a word for each dimension. A name that no tensor before had is bound to the size found; any other name, or an
    expression of names without spaces ("S+1"), is what the size must be.
    dtype: "" for the kernel's own (that of its first such tensor: float32, bfloat16 or float16), a name of torch's, or
    one that a `Let` has computed.
    The sizes that a tensor would bind, and its strides, are 0 where it may be None and is.
    """

    shape: str
    dtype: str = ""


class Contiguous(Tensor):
    """Elements lie without gaps, in order."""


class Packable(Contiguous):
    """[N, K] that may be packed (`packed.py`) where the kernels know such weights: N is negative then."""


class Rows(Tensor):
    """[T, C] whose rows are contiguous, and may lie apart."""


class Heads(Tensor):
    """[T, H, D] whose tokens are contiguous, and may lie apart: a slice of a fused projection's output."""


class Strided(Tensor):
    """[T, H, D] whose heads are contiguous each; tokens and heads may lie anywhere: heads before tokens, say."""


class Columns(Tensor):
    """The first columns of a contiguous tensor's rows, or all: rows may lie apart, evenly."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold of the sizes, besides each tensor's own shape.

    condition: an expression of sizes, arguments and, of `Columns`, `x_stride`. Where it is false, a ValueError says
    that `argument`, a tensor or any other, was expected to be `expected`, in which names in braces stand for their
    values.
    """

    condition: str
    argument: str
    expected: str


@dataclass(frozen=True, slots=True)
class Let:
    """Something to be computed, or to be refused, in Python: names = function(arguments).

    names: one or more, separated by commas; "" where the function only checks. arguments, separated by commas: names of
    the call's arguments, of sizes, `dtype` (the kernel's own) or `place` (a `binding.Place`).
    """

    names: str
    function: Callable[..., Any]
    arguments: str


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel: a row of the table. `kernel` makes it of a function and what is said of its tensors."""

    name: str
    function: Callable[..., Any]
    """The public function: its signature is the kernel's, whoever carries it out."""
    tensors: Mapping[str, Tensor]
    """By argument, in the order in which they are checked. Which may be None, their annotations say."""
    passes: str
    """What the extension's function is given, in its order: expressions of sizes and arguments, and for a tensor `x`
    its address `x_at` (0 for None) and, where rows or tokens may lie apart, their distance `x_stride` in elements;
    where heads may, theirs is `x_step`.
    Of a tensor that is None, the sizes that it alone has are 0, and so is its stride.
    `code` is the kernel's dtype as arguments.h counts them, `y_at` the result's address."""
    dtype_of: str = ""
    """The tensor whose dtype is the kernel's own: by default the first that names no other. A kernel that has an
    argument `dtype` is told."""
    out: str | None = None
    """The shape of the result, in sizes; None for a kernel that writes into its arguments."""
    out_dtype: str = "dtype"
    """The result's: `dtype`, or the name of an argument or of what was computed."""
    calls: str = ""
    """The extension's function, where it is named otherwise."""
    rules: Sequence[Rule] = ()
    lets: Sequence[Let] = ()
    """Like the rules, as soon as all that they name is known."""
    gpu_only: bool = False
    cpu_only: str = ""
    """What it is for, in words, where the GPU's column refuses it: models that need it are not loaded there."""

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def may_be_none(self, argument: str) -> bool:
        return "None" in str(self.signature.parameters[argument].annotation)


def kernel(**row: Any) -> Callable[[Function], Function]:
    """Enter a function into the table; `row`: the fields of `Op` but for its name and function."""

    def enter(function: Function) -> Function:
        TABLE[function.__name__] = Op(function.__name__, function, **row)
        return function

    return enter
