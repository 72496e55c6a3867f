"""The table of kernels: back ends have what it says, and a new row is checked and carried out as it says."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.kernels import binding, reference
from quire.kernels.table import TABLE, Contiguous, Let, Op, Rows, Rule
from tests.kernels.back_ends import CPU

EVERYWHERE = [name for name, op in TABLE.items() if not op.gpu_only]


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    return [(one.name, one.default, str(one.annotation)) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_reference_has_the_tables_signature(name: str) -> None:
    assert parameters(getattr(reference, name)) == parameters(TABLE[name].function)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_kernels_are_the_rows(name: str) -> None:
    assert getattr(kernels, name) is TABLE[name].function and name in kernels.__all__


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_cpu_and_the_rehearsal_have_every_row(name: str) -> None:
    from quire.kernels import rehearsal

    assert callable(getattr(rehearsal, name))
    if CPU:
        from quire.kernels import native

        assert parameters(getattr(native, name)) == parameters(TABLE[name].function)
        assert callable(getattr(native._C, TABLE[name].calls or name))


@pytest.mark.parametrize("name", list(TABLE))
def test_the_gpu_has_every_row(cuda: Any, name: str) -> None:
    assert callable(getattr(cuda, name))
    assert TABLE[name].cpu_only or callable(getattr(cuda._cuda, TABLE[name].calls or name))


@pytest.mark.parametrize("name", list(TABLE))
def test_every_argument_that_is_a_tensor_is_checked(name: str) -> None:
    op = TABLE[name]
    tensors = {one for one, _, kind in parameters(op.function) if kind in ("torch.Tensor", "torch.Tensor | None")}
    assert tensors == set(op.tensors)
    assert inspect.getdoc(op.function)


def make_row(**changes: Any) -> Op:
    """y = x * factor + shift, of x [T, C] and shift [C] or None; an even C, a positive factor."""

    def check_factor(factor: float) -> float:
        if factor <= 0:
            raise ValueError(f"factor: expected a number above 0, got {factor}")
        return factor / 2

    def scale(x: torch.Tensor, shift: torch.Tensor | None, factor: float = 2.0) -> torch.Tensor:
        """A kernel of this test's own."""
        raise AssertionError("the back end's function is called")

    row = Op(
        "scale",
        scale,
        tensors={"x": Rows("T C"), "shift": Contiguous("C", "float32")},
        rules=(Rule("C % 2 == 0", "x", "an even number of columns, not {C}"),),
        lets=(Let("half", check_factor, "factor"),),
        out="T C",
        passes="x_at, x_stride, T, C, shift_at, half, y_at, code",
    )
    return replace(row, **changes)


def bound(op: Op, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    monkeypatch.setattr(binding, "TABLE", {"scale": op})
    return binding.column("cpu", SimpleNamespace(scale=lambda *numbers: calls.append(numbers)), **how)["scale"]


def test_a_new_row_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    scale = bound(make_row(), calls, monkeypatch)
    x, shift = torch.zeros(3, 10, dtype=torch.bfloat16)[:, :4], torch.zeros(4)
    y = scale(x, shift=shift, factor=3.0)
    assert y.shape == (3, 4) and y.dtype is torch.bfloat16
    assert calls.pop() == (x.data_ptr(), 10, 3, 4, shift.data_ptr(), 1.5, y.data_ptr(), 1)
    y = scale(x, None)
    assert calls.pop() == (x.data_ptr(), 10, 3, 4, 0, 1.0, y.data_ptr(), 1)
    with_stream = bound(make_row(), calls, monkeypatch, stream=lambda tensor: tensor.shape[0] + 100)
    with_stream(x, None)
    assert calls.pop()[-1] == 103
    assert parameters(scale) == parameters(make_row().function) and scale.__doc__ == "A kernel of this test's own."


def test_a_new_row_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    scale = bound(make_row(), calls, monkeypatch)
    x, shift = torch.zeros(3, 4), torch.zeros(4)
    for arguments, error, message in [
        ((x.long(), shift), TypeError, "x: expected float32, bfloat16 or float16, got torch.int64"),
        ((x.to("meta"), shift), ValueError, "x: expected a tensor on the CPU, got one on meta"),
        ((x[0], shift), ValueError, r"x: expected \[T, C\] with contiguous rows, got shape \(4,\)"),
        ((x.t(), shift), ValueError, r"x: expected \[T, C\] with contiguous rows, got shape \(4, 3\)"),
        ((x, torch.zeros(5)), ValueError, r"shift: expected \[4\], contiguous, got shape \(5,\)"),
        ((x, shift.double()), TypeError, "shift: expected torch.float32, got torch.float64"),
        ((x, shift, 0.0), ValueError, "factor: expected a number above 0"),
        ((x[:, :3], None), ValueError, "x: expected an even number of columns, not 3, got shape"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            scale(*arguments)
    with pytest.raises(ValueError, match="x: ") as caught:
        scale(x[:, :3], None)
    assert "place.reject('x', x" in "".join(traceback.format_tb(caught.tb)), "a traceback shows the written source"
    assert not calls


def test_what_takes_more_than_the_extensions_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def carry_out(numbers: Any, y: torch.Tensor, shift: torch.Tensor | None, C: int, shift_at: int) -> None:
        seen.append((numbers, y, shift, C, shift_at))

    calls: list[tuple[Any, ...]] = []
    scale = bound(make_row(), calls, monkeypatch, done_by={"scale": carry_out}, unchecked=frozenset({"shift"}))
    x = torch.zeros(3, 4)
    shift = torch.zeros(1, device="meta")
    y = scale(x, shift)
    assert seen == [((x.data_ptr(), 4, 3, 4, 0, 1.0, y.data_ptr(), 0), y, shift, 4, 0)] and not calls


def test_what_is_none_has_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    tensors = {"x": Rows("T C"), "shift": Rows("M C")}
    row = make_row(tensors=tensors, rules=(), lets=(), passes="shift_at, shift_stride, M, y_at")
    scale = bound(row, calls, monkeypatch)
    x, shift = torch.zeros(3, 4), torch.zeros(7, 9)[:, :4]
    y = scale(x, shift)
    assert calls.pop() == (shift.data_ptr(), 9, 7, y.data_ptr())
    y = scale(x, None)
    assert calls.pop() == (0, 0, 0, y.data_ptr())


def test_a_rule_may_be_of_what_is_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    scale = bound(make_row(rules=(Rule("factor < C", "factor", "a number below {C}"),)), calls, monkeypatch)
    scale(torch.zeros(3, 4), None, 3.5)
    with pytest.raises(ValueError, match=r"^factor: expected a number below 4, got 4\.5$"):
        scale(torch.zeros(3, 4), None, 4.5)
    assert len(calls) == 1


def test_a_row_that_names_what_nothing_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"scale: nothing says what is named in .*rows > 0"):
        bound(make_row(rules=(Rule("rows > 0", "x", "rows"),)), [], monkeypatch)
