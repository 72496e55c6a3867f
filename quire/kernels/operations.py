"""An operation of torch's that a recording does again: what it reads, and the memory that it writes.

It is done by its variant that writes into given memory, where torch has one that takes the same arguments. In its first
run the result is compared with the operation's own, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

# Arguments that the result's memory says, once it is there.
_OF_MEMORY = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"})
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "lift_fresh", "lift_fresh_copy"})
# Their results have memory and no numbers.
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


class NotAgain(Exception):
    """An operation that cannot be done again on the same memory; the message says why."""


class Memory(Protocol):
    """Where results lie; see `recording.Workspace`."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def owns(self, tensor: torch.Tensor) -> bool: ...

    def again(self, tensor: torch.Tensor) -> torch.Tensor: ...


def name_of(func: Any) -> str:
    """The name of an operation, without its overload."""
    return str(func.overloadpacket._qualified_op_name).rpartition("::")[2]


class Operation:
    """Made by doing it once. Raises NotAgain where that cannot be repeated, or what the operation raises.

    replay: does it again; None where the results are views of what it was given.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Memory) -> None:
        self._results: Any = None
        self.replay: Callable[[], Any] | None = None
        if name_of(func) == "detach_":  # of a constant that is being made
            self._results = func(*args, **kwargs)
            return
        if func._schema.is_mutable:
            self.replay = _in_place(func, args, kwargs, memory)
            self._results = func(*args, **kwargs)
            return
        if _depends_on_numbers(func, args):
            raise NotAgain(": the shape of its result depends on numbers")
        made = func(*args, **kwargs)
        several = isinstance(made, (tuple, list))
        if not all(isinstance(one, torch.Tensor) for one in (made if several else [made])):
            raise NotAgain(": its result is no tensor")
        if _are_views(made, (args, kwargs)):
            self._results = made
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotAgain(": it draws numbers")
        own = [_like(one, memory) for one in (made if several else [made])]
        given, named = _again((args, kwargs), memory)
        self.replay = _writes(func, given, named, [memory.again(one) for one in own])
        try:
            self.replay()
        except RuntimeError as error:
            raise NotAgain(f": it does not write into given memory ({error})") from error
        for one, theirs in zip(own, made if several else [made], strict=True):
            if name_of(func) not in _EMPTY and not _same_bits(one, theirs):
                raise NotAgain(": its results are not the same in given memory")
        self._results = type(made)(own) if type(made) in (tuple, list) else tuple(own) if several else own[0]

    def __len__(self) -> int:
        return 0 if self.replay is None else 1

    def take_results(self) -> Any:
        """What it returned, once: whoever keeps a result keeps its memory from being taken again."""
        results, self._results = self._results, None
        return results


def _are_views(made: Any, given: Any) -> bool:
    memory = {one.untyped_storage().data_ptr() for one in tree_leaves(given) if isinstance(one, torch.Tensor)} - {0}
    return all(one.untyped_storage().data_ptr() in memory for one in tree_leaves(made))


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Memory) -> Callable[[], Any]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = kwargs.get(argument.name) if argument.kwarg_only else args[place] if place < len(args) else None
            if not all(memory.owns(one) for one in tree_leaves(given) if isinstance(one, torch.Tensor)):
                raise NotAgain(": it changes what is not the step's own")
    again, named = _again((args, kwargs), memory)

    def replay() -> None:
        func(*again, **named)

    return replay


def _depends_on_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        return True
    if torch.Tag.dynamic_output_shape not in tags:
        return False
    # Rows by their numbers are as many as the numbers; by a mask, as many as it has.
    numbers = tree_leaves(args[1]) if name_of(func) in ("index", "index_put") else [None]
    return not all(one is None or one.dtype in (torch.int64, torch.int32) for one in numbers) or numbers == [None]


def _like(made: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Memory for a result, laid out as torch has made it. Raises NotAgain for gaps or overlaps."""
    order = sorted(range(made.dim()), key=lambda d: (made.stride(d), made.shape[d]), reverse=True)
    whole = memory.empty(tuple(made.shape[d] for d in order), made.dtype)
    own = whole.permute(*(order.index(d) for d in range(made.dim()))) if order else whole
    if any(a != b for a, b, size in zip(own.stride(), made.stride(), made.shape, strict=True) if size > 1):
        raise NotAgain(": its result does not lie in one piece")
    return own


def _again(given: Any, memory: Memory) -> Any:
    return tree_map(lambda one: memory.again(one) if isinstance(one, torch.Tensor) else one, given)


def _writes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """What does the operation, and writes its results there."""
    if name_of(func) in _COPIES:
        copy, source = torch.ops.aten.copy_.default, args[0]
        return lambda: copy(own[0], source)
    variant, names = _variant(func)
    if variant is not None:
        passed = {name: value for name, value in kwargs.items() if name in names or name not in _OF_MEMORY}
        outs = [one.name for one in variant._schema.arguments if one.is_out]
        passed |= dict(zip(outs, own, strict=True))

        def write() -> None:
            variant(*args, **passed)

        return write

    def copied() -> None:
        made = func(*args, **kwargs)
        for one, target in zip(made if isinstance(made, (tuple, list)) else [made], own, strict=True):
            target.copy_(one)

    return copied


@cache
def _variant(func: Any) -> tuple[Any, frozenset[str]]:
    """The overload that writes into given memory, and the names of its arguments; None: there is none."""
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        one = getattr(func.overloadpacket, overload)
        arguments = [(each.name, str(each.type)) for each in one._schema.arguments if not each.is_out]
        if len(arguments) == len(one._schema.arguments) or len(one._schema.returns) != len(func._schema.returns):
            continue
        without = [each for each in wanted if each in arguments or each[0] not in _OF_MEMORY]
        if arguments == without:
            return one, frozenset(name for name, _ in arguments)
    return None, frozenset()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (one, other))
    return bool(torch.equal(a, b))
