"""One step of transformers' module with stand-ins for its weights: what each layer's attention computes, and whether
each token is treated by itself.

Nothing is as large as a weight, so that a model of any size is gone through in milliseconds. Operations are watched:
those that an embedding, a position or anything made of them reaches. What the step is of (token ids, positions) is
chosen so that no layer can tell it from a part of a longer prompt.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from quire.errors import UnsupportedModelError
from quire.kernels.operations import name_of
from quire.models.fallback.attention import LooksAtMasks, answering, spec_of
from quire.models.fallback.exact import PRODUCTS, RowExact
from quire.models.fallback.operations import kind_of
from quire.models.fallback.stand_ins import mixed
from quire.models.fallback.top import Top
from quire.types import AttentionSpec

FIRST = 5  # position of the step's first token
_TOKENS = (13, 11, 17, 19, 23)  # how many there are: a number that no size of the model is
_HERE = str(Path(__file__).parent)


@dataclass
class Findings:
    """specs: of each layer that attends, in the order of calls. rows: torch's own sums along rows, by name. unsafe:
    operations that do not treat tokens one by one, with their place. in_top: whether the top of the module does more
    than its projection. heads_first: names of norms that are given heads before tokens, [1, H, T, D]."""

    specs: list[AttentionSpec] = field(default_factory=list)
    rows: set[str] = field(default_factory=set)
    unsafe: dict[str, str] = field(default_factory=dict)
    in_top: bool = False
    heads_first: set[str] = field(default_factory=set)


class Probe(TorchDispatchMode, LooksAtMasks):
    """Watches a step. See `Findings`."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.tokens = next(n for n in _TOKENS if all(n != size for size in sizes))
        self.findings = Findings()
        self._about_tokens: Any = WeakIdKeyDictionary()
        self._aside = False
        self.head: nn.Module | None = None

    # -- what stand-ins tell -------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is no operation of the module's."""
        before, self._aside = self._aside, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._aside = before

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        self._about_tokens[x] = True
        return x

    def is_marked(self, x: torch.Tensor) -> bool:
        return x in self._about_tokens

    def called(self, module: nn.Module, x: torch.Tensor) -> None:
        self.findings.in_top = self.findings.in_top or module is not self.head
        if x.dim() == 4 and x.shape[1] != self.tokens:
            self.findings.heads_first.add(str(module.path))

    # -- what torch and transformers ask -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about = any(isinstance(x, torch.Tensor) and x in self._about_tokens for x in tree_leaves((args, kwargs)))
        if about and not self._aside:
            kind = kind_of(func, args, kwargs)
            if kind == "unsafe":
                self.findings.unsafe.setdefault(_text(func, args), _place())
            elif kind == "row":
                self.findings.rows.add(name_of(func).strip("_"))
            self.findings.in_top = self.findings.in_top or not (func.is_view or name_of(func) in ("_to_copy", "clone"))
        result = func(*args, **kwargs)
        if about:
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self._about_tokens[one] = True
        return result

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: Any
    ) -> torch.Tensor:
        with self.aside():
            spec = spec_of(module, query, key, value, mask, options)
            self.findings.specs.append(spec)
            rows = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], -1)
            heads, own = spec.num_heads, value.shape[3]
            out = mixed(rows, heads * own).to(query.dtype).view(1, query.shape[2], heads, own)
        return self.mark(out)


class _Watched(RowExact):
    """The mode, with a probe that knows its results and does not look at how it comes to them."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about = [self._probe.is_marked(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func in PRODUCTS and all(about):  # tokens with tokens: no layer of a row's
            return func(*args, **kwargs)
        with self._probe.aside():
            done = self._done(func, args, kwargs)
        if done is None:
            return func(*args, **kwargs)
        return self._probe.mark(done) if any(about) else done


def go_through(module: Any, top: Top, sizes: set[int], by_row: bool) -> Findings:
    """Findings about a module whose layers are stand-ins, see `stand_ins.py`. by_row: it is to run within `RowExact`.

    Raises UnsupportedModelError for a module that mixes tokens elsewhere than in its attention.
    """
    probe = Probe(sizes)
    for part in module.modules():
        if hasattr(part, "marks"):
            part.marks = probe
    exact = _Watched(probe) if by_row else None
    probe.head = module.get_output_embeddings()
    ids = torch.arange(probe.tokens).remainder(3)
    other = ids.clone()
    other[:2], other[4] = torch.tensor([2, 1]), 1 + ids[4] % 2
    first = _step(module, top, probe, ids, exact)
    findings = Findings(**vars(probe.findings))
    findings.specs = list(findings.specs)
    again = _step(module, top, probe, other, exact)
    same = ids == other
    if not all(torch.equal(a[same], b[same]) for a, b in zip(first, again, strict=True)):
        raise UnsupportedModelError(
            f"{type(module).__name__} mixes tokens elsewhere than in its attention (a convolution, a state, a shift): "
            "what it would have to keep of a sequence is not known, and it would be wrong in chunks."
        )
    _check_counting(module, top, probe, ids, exact)
    if not all(bool(x.isfinite().all()) for x in first):
        raise UnsupportedModelError(f"{type(module).__name__}: a step of it is not finite: some table has no numbers.")
    if not findings.specs:
        raise UnsupportedModelError(f"{type(module).__name__}: no layer called transformers' attention interface.")
    return findings


def _step(
    module: Any, top: Top, probe: Probe, ids: torch.Tensor, exact: RowExact | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states [T, C], logits [T, V])"""
    positions = torch.arange(FIRST, FIRST + len(ids)).unsqueeze(0)
    try:
        with torch.inference_mode(), torch.device("cpu"), answering(probe), exact or nullcontext(), probe:
            embeddings = module.get_input_embeddings()(probe.mark(ids.clone()))
            hidden = top.base(embeddings.unsqueeze(0), probe.mark(positions))
            probe.findings.in_top = False
            logits = top(hidden)
    except UnsupportedModelError:
        raise
    except Exception as error:
        place = _own_place(traceback.extract_tb(error.__traceback__))
        raise UnsupportedModelError(
            f"{type(module).__name__}: a step of it cannot be gone through: {type(error).__name__}: {error} ({place})."
        ) from error
    return hidden[0], logits[0]


def _check_counting(module: Any, top: Top, probe: Probe, ids: torch.Tensor, exact: RowExact | None) -> None:
    """Raise UnsupportedModelError for a module that counts positions otherwise than 0, 1, 2."""
    with torch.inference_mode(), torch.device("cpu"), answering(probe), exact or nullcontext():
        embeddings = module.get_input_embeddings()(ids).unsqueeze(0)
        counted = top.base(embeddings.clone(), torch.arange(len(ids)).unsqueeze(0))
        try:
            own = top.base(embeddings.clone(), None)
        except Exception:  # it does not count: it is told
            return
    if not torch.equal(counted, own):
        raise UnsupportedModelError(
            f"{type(module).__name__} counts positions by its tokens (padding), and not from 0: a step's positions "
            "alone do not say what it would make of them."
        )


def _text(func: Any, args: Sequence[Any]) -> str:
    shapes = [list(one.shape) for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
    return f"{name_of(func)} of {' and '.join(map(str, shapes))}"


def _place() -> str:
    return _own_place(traceback.extract_stack())


def _own_place(calls: Sequence[traceback.FrameSummary]) -> str:
    """The innermost place in transformers' or a plug-in's code."""
    parts = (str(Path(torch.__file__).parent), _HERE)
    own = [call for call in calls if not call.filename.startswith(parts)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else "place unknown"
