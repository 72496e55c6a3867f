"""What families share whose layers have attention, a state (Mamba-2), or both.

Configuration fields that shape the state's arithmetic: mamba_n_heads, mamba_d_head, mamba_d_state, mamba_n_groups,
mamba_d_conv, mamba_conv_bias, mamba_proj_bias, time_step_limit. (mamba_chunk_size cuts transformers' sums; quire's go
token by token.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import UnsupportedModelError
from quire.kernels.state_ops import MOST_TAPS
from quire.layers import MambaSpec
from quire.models.fields import refuse
from quire.types import KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAMBA_FIELDS = frozenset({"mamba_conv_bias", "mamba_proj_bias", "layer_types"})
_COUNTS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def check_mamba(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for a field of the state's that makes no sense, or that is not served."""
    for field in _COUNTS:
        value = getattr(config, field, None)
        if type(value) is not int or not 1 <= value < 2**31:
            refuse(config, field, "it must be a whole number from 1")
    if config.mamba_n_heads % config.mamba_n_groups:
        refuse(config, "mamba_n_groups", f"it must divide mamba_n_heads={config.mamba_n_heads}")
    if not 2 <= config.mamba_d_conv <= MOST_TAPS:
        refuse(config, "mamba_d_conv", f"it must be from 2 to {MOST_TAPS}")
    if config.hidden_act not in ("silu", "swish"):
        refuse(config, "hidden_act", "the convolution and the gate have a kernel for 'silu' alone")
    low, high = limits(config)
    if not 0 <= low <= high:
        refuse(config, "time_step_limit", "it must have two numbers from 0, the smaller first")


def limits(config: PretrainedConfig) -> tuple[float, float]:
    """Of the size of a step."""
    given: Any = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    if not isinstance(given, Sequence) or len(given) != 2 or any(type(one) not in (int, float) for one in given):
        refuse(config, "time_step_limit", "it must have two numbers from 0, the smaller first")
    return float(given[0]), float(given[1])


def mamba_spec(config: PretrainedConfig, **settings: Any) -> MambaSpec:
    """What the configuration says of a layer with a state; settings: other fields."""
    return MambaSpec(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_size=config.mamba_d_state,
        groups=config.mamba_n_groups,
        kernel=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        proj_bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
        dt_limits=limits(config),
        **settings,
    )


def with_states(spec: KVSpec, mamba: MambaSpec, layers: int) -> KVSpec:
    """What a model asks of the pool that has such layers with states beside those of `spec`.

    Raises UnsupportedModelError where there are no others: the pool is one of keys and values.
    """
    if not spec.num_layers:
        raise UnsupportedModelError("config.json: no layer has attention; models of states alone are not served.")
    return dataclasses.replace(spec, num_states=layers, state=mamba.state) if layers else spec
