"""Rotary position embeddings (arXiv:2104.09864) of every type that transformers knows.

The frequencies come from transformers' own functions, so a type that it adds tomorrow needs no line here. Two
kinds of type are told apart: static ones, whose frequencies are the model's, and those that depend on the
length of the sequence ("dynamic", "longrope"). Transformers recomputes the latter from the longest position
of a forward call. Here a token's frequencies must not depend on how its request was cut into steps, so:

* a token of the prompt takes the frequencies for the prompt's length,
* an output token at position p takes those for length p + 1.

That is what transformers computes for a request alone: the whole prompt at once, then token by token.

Multimodal rotation (M-RoPE, arXiv:2409.12191) turns sections of a head by a token's place in time, in height and in
width (`mrope_section`, in frequencies of each). The three are one number for text.

A model whose layers turn by different tables (Gemma 3's local and global ones) has a RotaryEmbedding for each, and
calls each once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from quire.errors import UnsupportedModelError
from quire.types import ForwardContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The static table is made by so many rows at a time, when a position first needs them: that of a model with
# 131072 positions would take 64 MB and a second at start-up. A page is always made whole, by a call of one
# shape, so that a row's bits do not depend on when it was made.
_PAGE = 2048

# What a class that turns by a RotaryEmbedding implements, for its `supported_fields`.
ROTARY_FIELDS = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)
# What a RotaryEmbedding, or transformers' functions for it, take of the rotary parameters.
ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
    "low_freq_factor", "high_freq_factor", "mrope_section",
})  # fmt: skip
# What transformers' functions do not look at, in any model.
SILENT_ROPE_KEYS = frozenset({"finetuned"})
# What a RotaryEmbedding takes besides is what single models' classes read, and others' ignore: mrope_interleaved
# (Qwen3-VL), short_mscale and long_mscale (Phi-3.5-MoE), parameters by type of layer (Gemma 3's full_attention and
# sliding_attention). A class that reads them says "rope_parameters.mrope_interleaved" among its `supported_fields`.

# Types whose frequencies depend on the length that the model was first trained for.
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")

# (inverse frequencies [R / 2] float32, factor on cosine and sine)
Frequencies = tuple[torch.Tensor, float]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """One step's rotation: token t turns by row rows[t] of cos_sin. The same for every layer that turns by it."""

    rows: torch.Tensor  # [T] int64
    cos_sin: torch.Tensor  # [P, R] float32: R / 2 cosines, then R / 2 sines
    interleaved: bool = False  # dimensions 2i and 2i + 1 are a pair, not i and i + R / 2
    first: int = 0  # dimensions first .. first + R of each head are turned


class RotaryEmbedding:
    """Makes each step's RotaryTable. No module: it has no parameters.

    Reads `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (4), `partial_rotary_factor`,
    `head_dim` and `max_position_embeddings`.

    max_positions: how far the embedding reaches; types that stretch the context by a factor reach that much
    further. Of several tables in a model, the least counts.
    threshold: None for a static type, or the length above which the frequencies depend on it.
    mrope: whether the configuration has `mrope_section`, so that steps need `rotary_positions`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        interleaved: bool = False,
        first: int = 0,
        head_dim: int | None = None,
        layer_type: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        theta: float | None = None,
    ) -> None:
        """Make the tables of one rotation; without more than `config`, of the whole head in halves.

        interleaved, first: see `RotaryTable`. head_dim: the dimensions that are turned where `partial_rotary_factor` is
        1, if that is not the configuration's `head_dim` (DeepSeek's qk_rope_head_dim, GPT-J's rotary_dim).
        layer_type: which of the configuration's rotary parameters, where they are by type of layer. parameters: these
        instead of the configuration's, in transformers 5's form; theta: this instead of their rope_theta.
        Raises UnsupportedModelError for parameters of which no table can be made.
        """
        parameters = rope_parameters(config, layer_type, parameters)
        by_layer = [name for name, value in parameters.items() if isinstance(value, Mapping)]
        if by_layer:
            raise UnsupportedModelError(f"config.json: rope_parameters are by type of layer: {', '.join(by_layer)}.")
        if theta is not None:
            parameters["rope_theta"] = theta
        head_dim = _head_dim(config) if head_dim is None else head_dim
        kind = parameters["rope_type"]
        original = _original_length(config, parameters)
        self._interleaved, self._first = interleaved, first
        self._init = _init_function(_Settings(config, parameters, head_dim), kind)
        # The loader builds models on the meta device; these numbers are real.
        with torch.device("cpu"):
            self._base = self._init(None)
            if kind == "longrope" and parameters.get("short_mscale") is not None:
                self._base = self._base[0], parameters["short_mscale"]
            self._table = torch.empty(0, 2 * len(self._base[0]))
        # Recorded steps know a table by its address, and stay when it is outgrown. Together they are no larger than it.
        self._outgrown: list[torch.Tensor] = []
        odd = kind != "proportional" and int(head_dim * parameters["partial_rotary_factor"]) % 2
        if odd or self._table.shape[1] > head_dim or not self._base[0].isfinite().all():
            raise UnsupportedModelError(
                f"config.json: {len(self._base[0])} rotary frequencies of rope_type {kind!r} do not fit heads of "
                f"{head_dim} dimensions: an even number of them must turn, and the frequencies be finite."
            )
        self.max_positions = _max_positions(config, kind, parameters, original)
        self.threshold: int | None = None
        if "dynamic" in kind:
            self.threshold = config.max_position_embeddings
        elif kind == "longrope":
            self.threshold = original
        self._axes = _axes(parameters, len(self._base[0]))
        self.mrope = self._axes is not None
        if self.mrope and self.threshold is not None:
            raise UnsupportedModelError(
                f"config.json: mrope_section is not served with rope_type {kind!r}: its frequencies vary with length."
            )
        # longrope has one other set of frequencies; dynamic has one for every length
        self._two_sets = kind == "longrope"
        self._long_factor = parameters.get("long_mscale")
        self._long = lru_cache(maxsize=4096)(self._long_frequencies)

    def __call__(self, ctx: ForwardContext) -> RotaryTable:
        """Return the step's table; call it once a step."""
        if self.threshold is not None and ctx.longest > self.threshold:
            return self._by_length(ctx)
        table = self._static(min(ctx.position_limit, self.max_positions), ctx.positions.device)
        if ctx.rotary_positions is None:
            return RotaryTable(ctx.positions, table, self._interleaved, self._first)
        if ctx.rotary_positions.dim() == 1:
            return RotaryTable(ctx.rotary_positions, table, self._interleaved, self._first)
        return self._by_axis(ctx.rotary_positions, table)

    def _by_axis(self, positions: torch.Tensor, table: torch.Tensor) -> RotaryTable:
        """A table with one row for each of the step's tokens; positions: [3, T]."""
        assert self._axes is not None
        axes = self._axes.to(table.device).repeat(2)  # of cosines, then of sines
        by_axis = table[positions]  # [3, T, R]
        own = by_axis.gather(0, axes.expand(1, *by_axis.shape[1:])).squeeze(0)
        rows = torch.arange(positions.shape[1], device=table.device)
        return RotaryTable(rows, own.contiguous(), self._interleaved, self._first)

    def _static(self, rows: int, device: torch.device) -> torch.Tensor:
        """The table of the model's own frequencies, [at least `rows`, R]."""
        table = self._table
        if rows > len(table) or table.device != device:
            if device.type == "meta":  # a rehearsal's: nothing of it is kept
                return torch.empty(rows, table.shape[1], device=device)
            starts = range(len(table), rows, _PAGE)
            pages = [_cos_sin(torch.arange(start, start + _PAGE), *self._base) for start in starts]
            self._outgrown.append(table)
            self._table = table = torch.cat([part.to(device) for part in (table, *pages)])
        return table

    def _by_length(self, ctx: ForwardContext) -> RotaryTable:
        """A table with one row for each of the step's tokens, [T, R]."""
        assert self.threshold is not None
        positions = ctx.positions.cpu()
        owner = torch.repeat_interleave(ctx.query_start.cpu().diff())
        prompt = ctx.prompt_len.cpu()[owner].long()
        lengths = torch.where(positions < prompt, prompt, positions + 1)
        distinct, which = lengths.unique(return_inverse=True)
        sets = [self._for_length(length) for length in distinct.tolist()]
        frequencies = torch.stack([s[0] for s in sets])[which]
        factors = torch.tensor([s[1] for s in sets])[which]
        table = _cos_sin(positions, frequencies, factors.unsqueeze(1))
        short = lengths <= self.threshold  # these take the static rows, bit by bit
        table[short] = self._static(int(positions.max()) + 1, table.device)[positions[short]]
        device = ctx.positions.device
        rows = torch.arange(len(positions), device=device)
        return RotaryTable(rows, table.to(device), self._interleaved, self._first)

    def _for_length(self, length: int) -> Frequencies:
        assert self.threshold is not None
        if length <= self.threshold:
            return self._base
        return self._long(self.threshold + 1 if self._two_sets else length)

    def _long_frequencies(self, length: int) -> Frequencies:
        frequencies, factor = self._init(torch.tensor(length))
        if self._long_factor is not None:
            return frequencies, self._long_factor
        # Transformers takes the factor anew for dynamic types, and keeps the model's for longrope.
        return frequencies, self._base[1] if self._two_sets else factor


def rope_parameters(
    config: PretrainedConfig, layer_type: str | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The rotary settings in transformers 5's form, whichever version wrote or read the configuration.

    layer_type: where it has them by type of layer, which; a type that it does not have, or has as null, raises
    UnsupportedModelError. given: settings instead of the configuration's.
    """
    if given is None:
        given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if layer_type is not None:
            own = given.get(layer_type)
            if not isinstance(own, Mapping):
                raise UnsupportedModelError(f"config.json: rope_parameters has no rotation for layers {layer_type!r}.")
            given = own
    parameters = dict(given)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = getattr(config, "rope_theta", None) or 10000.0
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = getattr(config, "partial_rotary_factor", None) or 1.0
    return parameters


class _Settings:
    """A configuration as transformers' functions read one, with other rotary parameters and another head size."""

    def __init__(self, config: PretrainedConfig, parameters: dict[str, Any], head_dim: int) -> None:
        self._config = config
        self.head_dim = head_dim
        # In transformers 5's words, then in 4's.
        self.rope_parameters = self.rope_scaling = parameters
        self.rope_theta = parameters["rope_theta"]
        self.partial_rotary_factor = parameters["partial_rotary_factor"]
        if parameters["rope_type"] in _WITH_ORIGINAL:
            original = _original_length(config, parameters)
            self.rope_parameters = self.rope_scaling = {**parameters, "original_max_position_embeddings": original}

    def standardize_rope_params(self) -> None:
        """Of transformers 5, which calls it: they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def check_rope(config: PretrainedConfig, supported: Collection[str]) -> None:
    """Refuse a rotary parameter that a RotaryEmbedding would ignore, unless `supported` has it.

    supported: of a class, where such a field is called "rope_parameters.mrope_interleaved". Raises
    UnsupportedModelError, which names the parameter.
    """
    parameters = rope_parameters(config)
    by_layer = [
        value
        for field, value in parameters.items()
        if isinstance(value, Mapping) and f"rope_parameters.{field}" in supported
    ]
    for field, value in (item for one in (parameters, *by_layer) for item in one.items()):
        if field in ROPE_KEYS or field in SILENT_ROPE_KEYS or f"rope_parameters.{field}" in supported:
            continue
        if value is not None and value is not False:
            raise UnsupportedModelError(
                f"config.json: {field}={value!r} among the rotary parameters of a {config.model_type!r} model is not "
                "served, and leaving it out of account would give wrong answers."
            )


def check_whole_heads(config: PretrainedConfig) -> None:
    """Refuse a partial rotation, of a class of which transformers' turns whole heads. Raises UnsupportedModelError."""
    parameters = rope_parameters(config)
    for one in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        part, kind = one.get("partial_rotary_factor"), one.get("rope_type", "default")
        # "proportional" gives full-width frequencies.
        if part not in (None, 1.0) and kind != "proportional":
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor={part} is not served with rope_type {kind!r}: transformers' "
                f"{config.model_type} turns whole heads."
            )


def _axes(parameters: dict[str, Any], frequencies: int) -> torch.Tensor | None:
    """Which of time, height and width (0, 1, 2) each frequency turns by, [R / 2]; None: no such thing."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return None
    if (
        not isinstance(sections, (list, tuple))
        or any(type(size) is not int or size < 0 for size in sections)
        or sum(sections) != frequencies
    ):
        raise UnsupportedModelError(
            f"config.json: mrope_section={sections!r} must be whole numbers that add up to the {frequencies} rotary "
            "frequencies of a head."
        )
    with torch.device("cpu"):
        if parameters.get("mrope_interleaved"):
            if len(sections) != 3:
                raise UnsupportedModelError(f"config.json: mrope_section={sections!r} must be three, interleaved.")
            # Time, height, width, time, height, width .. for as long as height and width have any left; then time.
            return torch.tensor([i % 3 if i < 3 * sections[i % 3] else 0 for i in range(frequencies)])
        axes = torch.tensor([section % 3 for section in range(len(sections))])
        return axes.repeat_interleave(torch.tensor(sections))


def _init_function(config: _Settings, kind: str) -> Callable[[torch.Tensor | None], Frequencies]:
    """Return f(sequence length or None) -> frequencies of that type."""
    if kind == "default":
        return lambda length: (_default_frequencies(config), 1.0)
    if kind in _OWN_KINDS:
        return _guarded(kind, lambda length: (_OWN_KINDS[kind](config), 1.0))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise UnsupportedModelError(f"rope_type {kind!r} is not known to this transformers. Known: {known}.")
    function = ROPE_INIT_FUNCTIONS[kind]
    return _guarded(kind, lambda length: function(config, torch.device("cpu"), seq_len=length))


def _guarded(kind: str, function: Callable[[torch.Tensor | None], Any]) -> Callable[[torch.Tensor | None], Frequencies]:
    def init(length: torch.Tensor | None) -> Frequencies:
        try:
            frequencies, factor = function(length)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedModelError(f"The configuration of rope_type {kind!r} is not usable: {error!r}") from error
        return frequencies.float(), float(factor)

    return init


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _default_frequencies(config: _Settings) -> torch.Tensor:
    size = int(config.head_dim * config.partial_rotary_factor)
    return 1.0 / (config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float) / size))


def _linear_frequencies(config: _Settings) -> torch.Tensor:
    return _default_frequencies(config) / config.rope_parameters["factor"]


def _llama3_frequencies(config: _Settings) -> torch.Tensor:
    """Waves that are long beside the first training's length are stretched, short ones stay; between, a blend."""
    frequencies, settings = _default_frequencies(config), config.rope_parameters
    factor, low, high = (settings[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = settings["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    share = (length / waves - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    kept = torch.where(waves < length / high, frequencies, between)
    return torch.where(waves > length / low, frequencies / factor, kept)


# Computed here as transformers computes them, to the bit: its import would take longer than all the rest of a start.
_OWN_KINDS = {"linear": _linear_frequencies, "llama3": _llama3_frequencies}


def _original_length(config: PretrainedConfig, parameters: dict[str, Any]) -> int:
    """The length that the model was first trained for."""
    # Phi-3 has it beside the rotary parameters, and there it counts first, as in transformers.
    return (
        getattr(config, "original_max_position_embeddings", None)
        or parameters.get("original_max_position_embeddings")
        or config.max_position_embeddings
    )


def _max_positions(config: PretrainedConfig, kind: str, parameters: dict[str, Any], original: int) -> int:
    """`max_position_embeddings` is the stretched length for llama3 and longrope, else the original."""
    factor = parameters.get("factor") or 1.0
    if kind == "yarn":
        return max(config.max_position_embeddings, int(original * factor))
    if kind == "linear" or "dynamic" in kind:
        return int(config.max_position_embeddings * factor)
    return config.max_position_embeddings


def _cos_sin(positions: torch.Tensor, frequencies: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """positions [P], frequencies [R / 2] or [P, R / 2] -> [P, R] float32.

    Angles are float32 products, as transformers has them. Their cosines are taken in float64 and rounded: in
    float32, torch's last bit depends on where in the call an element stands.
    """
    angles = (positions.float().unsqueeze(1) * frequencies).double()
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1).float()
