"""From a row of the table to the function that checks a call's arguments and makes it.

A call costs a few microseconds and there are some two hundred in a decode step. So a row is not looked at while a call
is made: its checks are written out once, as Python source, in which only a failed one composes a message. Tracebacks
show that source; `source` returns it.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch

from quire.kernels.packed import marked_shape
from quire.kernels.table import TABLE, Columns, Contiguous, Heads, Let, Op, Packable, Rows, Rule, Strided, Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# What the written source calls by name.
_CODES = DTYPES
_FLOAT32, _FLOAT64 = torch.float32, torch.float64
_INT32, _INT64, _UINT8 = torch.int32, torch.int64, torch.uint8
_empty = torch.empty
_marked_shape = marked_shape

Numbers = tuple[Any, ...]  # what an extension's function is given

_LAYOUT = {
    Contiguous: ", contiguous",
    Packable: ", contiguous, or on a CPU such a one packed",
    Rows: " with contiguous rows",
    Heads: " with contiguous tokens",
    Strided: " with contiguous heads",
    Columns: ", the first columns of a contiguous tensor",
}


class Place:
    """A kind of device on which all tensors of a call must lie."""

    def __init__(self, device: str, takes_packed: bool) -> None:
        """device: "cpu", "cuda" or "meta". takes_packed: whether its kernels know packed weights."""
        self.device = device
        self.takes_packed = takes_packed
        self.here: Callable[[torch.Tensor], bool] = attrgetter(f"is_{device}")
        self._words = {"cpu": "the CPU", "cuda": "a GPU"}.get(device, device)

    def reject(self, name: str, tensor: torch.Tensor, expected: str, dtype: torch.dtype | None = None) -> NoReturn:
        """Raise the error that says what is wrong with an argument; dtype None: any of the kernels' own."""
        if not self.here(tensor):
            raise ValueError(f"{name}: expected a tensor on {self._words}, got one on {tensor.device}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
        if dtype is None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        if dtype is not None and tensor.dtype is not dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: expected {expected}, got shape {shape} with strides {strides}")


def column(
    device: str,
    extension: Any = None,
    stream: Callable[[torch.Tensor], int] | None = None,
    done_by: Mapping[str, Callable[..., Any]] | None = None,
    unchecked: frozenset[str] = frozenset(),
    gpu: bool = False,
) -> dict[str, Callable[..., Any]]:
    """A back end's functions, by name: those of the table that it has.

    device: where tensors must lie. extension: the compiled module; None where nothing is to be computed.
    stream: what a GPU's functions are given last, of the first tensor. gpu: whether it has what only a GPU has.
    done_by: functions that make the call of a kernel that takes more than the extension's function of that name. They
    are given what their parameters name: arguments and sizes of the call, `numbers` (what the row passes, as a tuple),
    `y` (the result). unchecked: arguments that are let pass as they are.
    """
    place, done_by = Place(device, hasattr(extension, "pack_rows")), done_by or {}
    return {
        name: _bind(op, place, extension, stream, done_by.get(name), unchecked)
        for name, op in TABLE.items()
        if gpu or not op.gpu_only
    }


def _bind(
    op: Op,
    place: Place,
    extension: Any,
    stream: Callable[[torch.Tensor], int] | None,
    done_by: Callable[..., None] | None,
    unchecked: frozenset[str],
) -> Callable[..., Any]:
    text = source(op, place.device, extension is not None, stream is not None, done_by, unchecked)
    # In this folder, by its name, so that it counts as a kernel's and not as a model's (recording.place_of).
    filename = str(Path(__file__).with_name(f"<{op.name} on {place.device}>"))
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    made: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), globals(), made)
    call = getattr(extension, op.calls or op.name) if extension is not None and done_by is None else None
    function = made["make"](place, call, stream, done_by, *(let.function for let in op.lets))
    return wraps(op.function)(function)


def source(
    op: Op,
    device: str,
    calls: bool = True,
    with_stream: bool = False,
    done_by: Callable[..., None] | None = None,
    unchecked: frozenset[str] = frozenset(),
) -> str:
    """The function of a row on one kind of device, as Python. See `column` for the arguments."""
    given = "dtype" in op.signature.parameters  # which then is the kernel's own
    own = op.dtype_of or next((name for name, tensor in op.tensors.items() if not tensor.dtype and not given), "")
    lines = []
    if given:
        lines += ["code = _CODES.get(dtype)", "if code is None:"]
        lines += ["    raise TypeError(f'dtype: expected float32, bfloat16 or float16, got {dtype}')"]
    elif own:
        lines += [f"dtype = {own}.dtype", "code = _CODES.get(dtype)", "if code is None:"]
        lines += [f"    place.reject({own!r}, {own}, '')"]
    known = {*op.signature.parameters, "dtype", "place"}
    waiting: list[Rule | Let] = [*op.rules, *op.lets]
    lines += _ready(op, waiting, known)
    for name, tensor in op.tensors.items():
        sizes = [size for size in tensor.shape.split() if size.isidentifier() and size not in known]
        if name in unchecked:
            lines.append(f"{' = '.join([f'{name}_at', *sizes])} = 0")
            known.update(sizes)
            continue
        checks = _checks(name, tensor, device, known, name == own)
        if op.may_be_none(name):
            strides = [] if isinstance(tensor, Contiguous) else [f"{name}_stride"]
            strides += [f"{name}_step"] if isinstance(tensor, Strided) else []
            none = f"    {' = '.join([f'{name}_at', *strides, *sizes])} = 0"
            checks = [f"if {name} is None:", none, "else:", *("    " + line for line in checks)]
        lines += [*checks, *_ready(op, waiting, known)]
    if waiting:
        raise ValueError(f"{op.name}: nothing says what is named in {waiting}")
    first = own or next(iter(op.tensors))
    if op.out is not None:
        lines += [f"y = _empty({_tuple(op.out.split())}, dtype={op.out_dtype}, device={first}.device)"]
        lines += ["y_at = y.data_ptr()"]
    if done_by is not None:
        lines += [f"numbers = ({op.passes})", f"done_by({', '.join(inspect.signature(done_by).parameters)})"]
    elif calls:
        lines.append(f"call({op.passes}{f', stream({first})' if with_stream else ''})")
    if op.out is not None:
        lines.append("return y")
    lets = "".join(f", let_{i}" for i in range(len(op.lets)))
    body = "\n".join("        " + line for line in lines)
    return (
        f"def make(place, call, stream, done_by{lets}):\n"
        f"    def {op.name}{_plain(op.signature)}:\n{body}\n\n    return {op.name}\n"
    )


def _checks(name: str, tensor: Tensor, device: str, known: set[str], own: bool) -> list[str]:
    """The lines that refuse a tensor, or bind its address, its stride and the sizes that are new; `known` grows."""
    sizes = tensor.shape.split()
    new = [size for size in sizes if size.isidentifier() and size not in known]
    dtype = _dtype_name(tensor, known)
    words = ", ".join(size if size in new else "{" + size + "}" for size in sizes)
    reject = f"    place.reject({name!r}, {name}, f'[{words}]{_LAYOUT[type(tensor)]}', {dtype})"
    wrong = [f"not {name}.is_{device}"] if own else [f"{name}.dtype is not {dtype}", f"not {name}.is_{device}"]
    lines = []
    if not new:
        wrong.append(f"{name}.shape != {_tuple(sizes)}")
    else:
        lines.append(f"{name}_shape = {name}.shape")
        if isinstance(tensor, Packable):
            lines += [f"if len({name}_shape) == 4 and place.takes_packed:"]
            lines += [f"    {name}_shape = _marked_shape({name}_shape)"]
        wrong.append(f"len({name}_shape) != {len(sizes)}")
        wrong += [f"{name}_shape[{i}] != {size}" for i, size in enumerate(sizes) if size not in new]
    if isinstance(tensor, Contiguous):
        wrong.append(f"not {name}.is_contiguous()")
    lines += [f"if {' or '.join(wrong)}:", reject]
    if len(new) == len(sizes):
        lines.append(f"{_tuple(sizes)} = {name}_shape")
    else:
        lines += [f"{size} = {name}_shape[{sizes.index(size)}]" for size in new]
    known.update(new)
    if isinstance(tensor, Rows):
        lines += [f"{name}_stride, inner = {name}.stride()", f"if inner != 1 and {sizes[1]} > 1:", reject]
    elif isinstance(tensor, Heads):
        lines += [f"{name}_stride, middle, inner = {name}.stride()"]
        lines += [f"if inner != 1 or (middle != {sizes[2]} and {sizes[1]} > 1):", reject]
    elif isinstance(tensor, Strided):
        lines += [f"{name}_stride, {name}_step, inner = {name}.stride()", f"if inner != 1 and {sizes[2]} > 1:", reject]
    elif isinstance(tensor, Columns):
        known.add(f"{name}_stride")
        lines += [f"{name}_stride = {sizes[-1]}", f"if not {name}.is_contiguous():"]
        lines += [f"    {name}_stride = {name}.stride()[-2]"]
        lines += [f"    if {name}_stride < {sizes[-1]} or {name}.stride() != {_strides(name, sizes)}:", "    " + reject]
    return [*lines, f"{name}_at = {name}.data_ptr()"]


def _ready(op: Op, waiting: list[Rule | Let], known: set[str]) -> list[str]:
    """The lines of those rules and lets that name nothing unknown, which are taken out of `waiting`; `known` grows."""
    lines = []
    for one in list(waiting):
        text = one.condition if isinstance(one, Rule) else one.arguments
        if not known.issuperset(compile(text, "", "eval").co_names):
            continue
        waiting.remove(one)
        if isinstance(one, Rule):
            lines += [f"if not ({one.condition}):"]
            if one.argument in op.tensors:
                dtype = _dtype_name(op.tensors[one.argument], known)
                lines += [f"    place.reject({one.argument!r}, {one.argument}, f{one.expected!r}, {dtype})"]
            else:
                message = f"{one.argument}: expected {one.expected}, got {{{one.argument}!r}}"
                lines += [f"    raise ValueError(f{message!r})"]
            continue
        lines.append(f"{one.names + ' = ' if one.names else ''}let_{op.lets.index(one)}({one.arguments})")
        known.update(one.names.replace(",", " ").split())
    return lines


def _dtype_name(tensor: Tensor, known: set[str]) -> str:
    if tensor.dtype in known:
        return tensor.dtype
    return f"_{tensor.dtype.upper()}" if tensor.dtype else "dtype"


def _strides(name: str, sizes: list[str]) -> str:
    """Those of a contiguous tensor of these sizes but for the last, which is the stride of the rows."""
    strides, factors = ["1"], [f"{name}_stride"]
    for size in reversed(sizes[:-1]):
        strides.append(" * ".join(factors))
        factors.append(size)
    return _tuple(strides[::-1])


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)},)" if len(items) == 1 else f"({', '.join(items)})"


def _plain(signature: inspect.Signature) -> str:
    """The parameters and their defaults alone."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
