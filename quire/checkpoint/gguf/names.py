"""Which tensors of a GGUF file, and which of their rows, a parameter is made of.

The `gguf` package says what llama.cpp calls each layer of each family (`get_tensor_name_map`); here is what that does
not: tensors of which a parameter is a part, or that are a part of a parameter, and rows that llama.cpp has in another
order. Row orders are those of its converter (https://github.com/ggml-org/llama.cpp, conversion/): a rotation joins
neighbours there, and the halves of a head in transformers; fused projections have all queries, keys, then values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.rope import FACTORS
from quire.errors import CheckpointError, UnsupportedModelError

# Families whose queries' and keys' rows are in the order of neighbours; of the second ones, biases are not.
_NEIGHBOURS = frozenset({"llama", "arcee", "smollm3", "granite", "granitemoe", "internlm2", "baichuan", "mistral3",
                         "granitehybrid"})  # fmt: skip
_NEIGHBOURS_BUT_BIASES = frozenset({"olmo", "minicpm"})
# Families in whose fused projection each key follows its own queries, in transformers.
_GROUPED = frozenset({"falcon", "bloom", "gptneox", "internlm2"})
# Families whose norms multiply by 1 + weight in transformers, and by the weight in llama.cpp.
_ONE_MORE = frozenset({"gemma", "gemma2", "gemma3", "nemotron"})

_EXPERT = re.compile(r".+\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_OF_KEYS = re.compile(r".+\.layers\.(\d+)\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)")
# Names that the package's map does not know -> tensors, whose rows follow one another.
_OTHERS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), names)
    for pattern, names in {
        r"lm_head\.(weight|bias)": (r"output.\1",),
        r".+\.layers\.(\d+)\.self_attn\.sinks": (r"blk.\1.attn_sinks.weight",),
        r".+\.(?:layers)\.(\d+)\..*e_score_correction_bias": (r"blk.\1.exp_probs_b.bias",),
        r".+\.layers\.(\d+)\..*shared_mlp\.input_linear\.weight": (
            r"blk.\1.ffn_gate_shexp.weight", r"blk.\1.ffn_up_shexp.weight",
        ),
        r".+\.layers\.(\d+)\.shared_mlp\.input_linear\.(weight)": (r"blk.\1.ffn_gate.\2", r"blk.\1.ffn_up.\2"),
        r".+\.layers\.(\d+)\..*shared_mlp\.output_linear\.weight": (r"blk.\1.ffn_down_shexp.weight",),
        r".+\.layers\.(\d+)\.shared_mlp\.output_linear\.(weight)": (r"blk.\1.ffn_down.\2",),
        r".+\.layers\.(\d+)\.mamba\.dt_bias": (r"blk.\1.ssm_dt.bias",),
        r"transformer\.word_embeddings_layernorm\.(weight|bias)": (r"token_embd_norm.\1",),
        r"transformer\.h\.(\d+)\.post_attention_layernorm\.(weight|bias)": (r"blk.\1.ffn_norm.\2",),
        r".+\.layers\.(\d+)\.self_attn\.(?:W_pack|wqkv)\.(weight|bias)": (r"blk.\1.attn_qkv.\2",),
    }.items()
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor. expert: of the first dimension; None: there are no experts. rows: from, to; None: all of
    them. heads: how many of them are in the order of neighbours; 0: they are in transformers' order."""

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    heads: int = 0


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: pieces, one behind the other; then, if groups is set, rows of so many groups of
    queries are put before each one's key and value. added: to every number of it. latent: keys and values out of a
    latent (see `latent_rows`). is_log: the file has the negative powers of e of its numbers."""

    pieces: tuple[Piece, ...]
    groups: tuple[int, int] | None = None
    added: float = 0.0
    latent: bool = False
    is_log: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor, as it stands."""
        return self == Source((Piece(self.pieces[0].tensor),))


class Names:
    """Looks parameters up. layers: how many the model has."""

    def __init__(self, file: GgufFile, layers: int) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.file, self.family, self._layers = file, file.architecture, layers
        found = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.family]
        if not found:
            raise UnsupportedModelError(f"{file.name}: the installed gguf package does not know {self.family!r}.")
        self._map: Any = get_tensor_name_map(found[0], layers)

    def is_ignored(self, tensor: str) -> bool:
        """Whether a tensor holds nothing to load: factors of frequencies are in the configuration, and layers behind
        the last guess further tokens."""
        layer = re.match(r"blk\.(\d+)\.", tensor)
        guesses = self.file.number("nextn_predict_layers", 0, least=0)
        return tensor in FACTORS or (layer is not None and self._layers <= int(layer[1]) < self._layers + guesses)

    def source(self, place: str) -> Source | None:
        """Of the parameter of this name; None: no tensor fills it."""
        expert = _EXPERT.fullmatch(place)
        found = self._expert(*expert.groups()) if expert else self._layer(place)
        if found is not None and self.family in _ONE_MORE and place.endswith("norm.weight"):
            return replace(found, added=-1.0)
        return found

    def numbers(self, place: str) -> list[float] | None:
        """Of a parameter whose numbers stand in a key, with one for each layer; None: it is no such. Raises
        CheckpointError."""
        found = _OF_KEYS.fullmatch(place) if self.family == "apertus" else None
        if found is None:
            return None
        key, layer = f"xielu.{found[2]}", int(found[1])
        values = self.file.metadata.get(key)
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or layer >= len(values):
            raise CheckpointError(f"{self.file.name}: {key} must be an array with a number for each layer.")
        return [float(values[layer])]

    def _there(self, *tensors: str) -> bool:
        return all(name in self.file.tensors for name in tensors)

    def _expert(self, layer: str, number: str, kind: str, suffix: str) -> Source | None:
        stacked, fused = f"blk.{layer}.ffn_{kind}_exps.{suffix}", f"blk.{layer}.ffn_gate_up_exps.{suffix}"
        if self._there(stacked):
            return Source((Piece(stacked, int(number)),))
        if kind != "down" and self._there(fused):
            half = self.file.tensors[fused].shape[1] // 2
            return Source((Piece(fused, int(number), (0, half) if kind == "gate" else (half, 2 * half)),))
        alone = f"blk.{layer}.ffn_{kind}.{number}.{suffix}"  # as Mixtral's first files have it
        return Source((Piece(alone),)) if self._there(alone) else None

    def _layer(self, place: str) -> Source | None:
        for pattern, names in _OTHERS:
            found = pattern.fullmatch(place)
            source = None if found is None else self._named([found.expand(name) for name in names])
            if source is not None:
                return source
        name = self._map.get_name(place, try_suffixes=(".weight", ".bias"))
        if name is None:
            return None
        if place.endswith(".A_log"):
            return Source((Piece(name),), is_log=True) if self._there(name) else None
        if ".attn_kv_b." in name and not self._there(name):
            return self._latent(name)
        return self._named([name])

    def _named(self, tensors: list[str]) -> Source | None:
        if len(tensors) == 1:
            for find in (self._fused_projection, self._part_of_fused, self._fused_gate):
                found = find(tensors[0])
                if found is not None:
                    return found
        return Source(tuple(map(self._piece, tensors))) if self._there(*tensors) else None

    def _piece(self, tensor: str) -> Piece:
        """The whole tensor, with the order of its rows."""
        kind = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor)
        if kind is None or not self._in_neighbours(kind[2]):
            return Piece(tensor)
        return Piece(tensor, heads=self.file.heads[kind[1] == "k"])

    def _in_neighbours(self, suffix: str) -> bool:
        return self.family in _NEIGHBOURS or (self.family in _NEIGHBOURS_BUT_BIASES and suffix == "weight")

    def _fused_projection(self, tensor: str) -> Source | None:
        """A parameter of queries, keys and values, which the file has as one tensor or as three."""
        if not re.fullmatch(r"blk\.\d+\.attn_qkv\.(weight|bias)", tensor):
            return None
        groups = self.file.heads if self.family in _GROUPED else None
        if self._there(tensor):
            return Source((Piece(tensor),), groups)
        apart = [tensor.replace("attn_qkv", f"attn_{one}") for one in "qkv"]
        return Source(tuple(map(self._piece, apart)), groups) if self._there(*apart) else None

    def _part_of_fused(self, tensor: str) -> Source | None:
        """Queries, keys or values that the file has in one tensor."""
        kind = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])\.(weight|bias)", tensor)
        if kind is None or self._there(tensor):
            return None
        fused = f"{kind[1]}qkv.{kind[3]}"
        if not self._there(fused):
            return None
        heads, groups = self.file.heads
        size = self.file.tensors[fused].shape[0] // (heads + 2 * groups)
        starts = {"q": (0, heads), "k": (heads, heads + groups), "v": (heads + groups, heads + 2 * groups)}
        first, end = starts[kind[2]]
        turned = kind[2] != "v" and self._in_neighbours(kind[3])
        return Source((Piece(fused, None, (first * size, end * size), end - first if turned else 0),))

    def _fused_gate(self, tensor: str) -> Source | None:
        """A parameter of gates and then of what they multiply, of which the file has two tensors."""
        gate = tensor.replace("ffn_up", "ffn_gate")
        if self.family not in ("phi3", "chatglm", "glm4") or gate == tensor or not self._there(gate, tensor):
            return None
        return Source((Piece(gate), Piece(tensor)))

    def _latent(self, name: str) -> Source | None:
        """Keys and values out of a latent, of which the file has the keys turned, head by head."""
        apart = [name.replace("attn_kv_b", one) for one in ("attn_k_b", "attn_v_b")]
        return Source((Piece(apart[0]), Piece(apart[1])), latent=True) if self._there(*apart) else None


def rows_of(source: Source, read: Sequence[Callable[[torch.Tensor], torch.Tensor]] = ()) -> Callable[..., torch.Tensor]:
    """What makes the parameter of its pieces' tensors, each given once: rows of bytes, or of numbers.

    read: what makes numbers of each piece's rows, once they are taken from its tensor.
    """

    def make(*stored: torch.Tensor) -> torch.Tensor:
        parts = [_taken(piece, one) for piece, one in zip(source.pieces, stored, strict=True)]
        if read:
            parts = [own(one) for own, one in zip(read, parts, strict=True)]
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        if source.groups is not None:
            made = made[grouped_order(len(made), *source.groups)]
        if source.is_log:
            return made.neg().log()
        return made + source.added if source.added else made

    return make


def _taken(piece: Piece, stored: torch.Tensor) -> torch.Tensor:
    rows = stored if piece.expert is None else stored[piece.expert]
    if piece.rows is not None:
        rows = rows[piece.rows[0] : piece.rows[1]]
    return rows[halves_order(len(rows), piece.heads)] if piece.heads else rows


def halves_order(rows: int, heads: int) -> torch.Tensor:
    """For each row of the halves' order, where it is in the neighbours': [rows] int64."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def grouped_order(rows: int, heads: int, groups: int) -> torch.Tensor:
    """For each row of an order in which each key and value follows its queries, where it is in the file's."""
    queries, size = heads // groups, rows // (heads + 2 * groups)
    places = torch.arange(rows).view(-1, size)
    query, key, value = places.split([heads, groups, groups])
    by_group = [query.view(groups, queries, size), key.unsqueeze(1), value.unsqueeze(1)]
    return torch.cat(by_group, 1).reshape(-1)


def latent_rows(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """keys: [heads, rank, size], values: [heads, size, rank], of numbers -> [heads * (both sizes), rank]: each head's
    keys, then its values."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


__all__ = ["Names", "Piece", "Source", "latent_rows", "rows_of"]
