"""Which of torch's operations treat each token by itself, to the last bit, and which do not.

torch treats the last few elements of a call otherwise than the rest (vectors and what is left over), and cuts a call
into pieces for its threads: whatever is no exactly rounded operation then depends on what shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.kernels.operations import name_of

# Copies, look-ups, comparisons, and operations whose result IEEE 754 fixes, element by element.
EXACT = frozenset(
    """
    _assert_async _conj _local_scalar_dense _reshape_alias _to_copy _unsafe_view abs absolute add add_ alias all
    amax amin any arange argmax argmin argsort as_strided as_strided_scatter atleast_1d atleast_2d bincount
    bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_tensors bucketize cat ceil chunk clamp clamp_
    clamp_max clamp_max_ clamp_min clamp_min_ clip clone concat concatenate conj constant_pad_nd contiguous copy
    copy_ copysign cumsum detach detach_ diff div div_ divide embedding empty empty_like empty_permuted
    empty_strided eq eq_ expand expand_as expand_copy fill fill_ flatten flip floor floor_ floor_divide fmod
    full full_like gather ge greater greater_equal gt hardsigmoid hardswish hardtanh histc hstack imag index
    index_put index_put_ index_select is_nonzero isfinite isin isinf isnan isneginf isposinf item le leaky_relu
    less less_equal lift_fresh logical_and logical_not logical_or logical_xor lt masked_fill masked_fill_
    masked_scatter masked_select max maximum min minimum moveaxis movedim mul mul_ multiply narrow narrow_copy
    ne neg neg_ negative new_empty new_empty_strided new_full new_ones new_zeros nonzero not_equal one_hot ones
    ones_like permute positive ravel real reciprocal relu relu_ remainder repeat repeat_interleave reshape
    reshape_as resolve_conj resolve_neg roll round rsqrt rsub scalar_tensor scatter scatter_ searchsorted select
    select_scatter sgn sign slice slice_scatter sort split split_with_sizes sqrt square square_ squeeze squeeze_
    stack sub sub_ subtract swapaxes swapdims t take_along_dim threshold tile to topk trace transpose tril triu
    true_divide trunc type_as unbind unflatten unfold unsafe_split unsqueeze unsqueeze_ view view_as
    view_as_complex view_as_real vstack where zero_ zeros zeros_like
""".split()  # noqa: SIM905 (a list of strings would be many times as long)
)
# Sums along a row, which are exact to the bit where the row lies in one piece, whatever the number of rows.
OF_ROWS = frozenset(
    """
    _fused_rms_norm _log_softmax _softmax cumprod layer_norm linalg_vector_norm log_softmax logsumexp mean
    native_layer_norm norm prod rms_norm softmax std sum var var_mean
""".split()  # noqa: SIM905 (a list of strings would be many times as long)
)
# Element by element; `exact.py` does them row by row.
OF_ELEMENTS = frozenset(
    """
    addcmul atan celu complex elu erf exp exp2 expm1 lerp log log10 log1p log2 log_sigmoid_forward log_sigmoid pow selu
    sin cos softplus softsign
""".split()  # noqa: SIM905 (a list of strings would be many times as long)
)
# What a recorded step may have: the step that was probed had no other. Numbers for Python are none of it, and dropout
# only where it does nothing.
RECORDED = (EXACT | OF_ROWS | OF_ELEMENTS | {"detach_", "dropout", "native_dropout", "feature_dropout"}) - {
    "_assert_async", "_local_scalar_dense", "is_nonzero", "item",
}  # fmt: skip
# Exactly rounded for these exponents only.
_EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
# Matrix products: exact where each result is a single product.
PRODUCTS = frozenset(
    """
    addbmm addmm baddbmm bmm convolution dot einsum linear matmul mm mv
""".split()  # noqa: SIM905 (a list of strings would be many times as long)
)


def kind_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Of an operation on tokens: "exact", "row" (torch's own, row by row), or "unsafe"."""
    name = name_of(func)
    if func.is_view:
        return "exact"
    if name in ("add", "sub", "add_", "sub_", "rsub") and kwargs.get("alpha", 1) != 1:
        return "unsafe"
    if name in ("dropout", "native_dropout", "feature_dropout"):
        return "exact" if not (args[2] if len(args) > 2 else kwargs.get("train")) else "unsafe"
    if name in ("mul", "mul_", "multiply", "div", "div_", "divide", "reciprocal") and _is_complex(args):
        return "unsafe"
    if name in OF_ROWS and not args[0].is_floating_point():
        return "exact"
    if name in ("pow", "pow_"):
        return "exact" if len(args) > 1 and args[1] in _EXACT_POWERS else "unsafe"
    if name == "cumsum" and not args[0].is_floating_point():
        return "exact"
    if name == "cumsum":
        return "row" if _is_last(args[0], args[1]) else "unsafe"
    if name in ("index_add", "index_add_", "scatter_add", "scatter_add_"):
        return "exact" if not args[0].is_floating_point() else "unsafe"
    if name in OF_ROWS:
        return "row" if _along_rows(name, args, kwargs) else "unsafe"
    if name in PRODUCTS:
        return "exact" if _is_outer(name, args) else "unsafe"
    return "exact" if name in EXACT else "unsafe"


def _is_complex(args: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in args)


def _is_outer(name: str, args: Sequence[Any]) -> bool:
    """Whether each result is one product."""
    return name in ("mm", "bmm") and args[0].shape[-1] == 1


def _along_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    x = args[0]
    if "layer_norm" in name or "rms_norm" in name:
        return bool(x.stride(-1) == 1 and len(args[1]) == 1)
    place = 2 if name in ("norm", "linalg_vector_norm") else 1
    dims = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(dims, (list, tuple)):
        return len(dims) == 1 and _is_last(x, dims[0])
    return isinstance(dims, int) and not isinstance(dims, bool) and _is_last(x, dims)


def _is_last(x: torch.Tensor, dim: int) -> bool:
    return dim in (-1, x.dim() - 1) and (x.stride(-1) == 1 or x.shape[-1] == 1)
