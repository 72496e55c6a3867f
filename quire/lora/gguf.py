"""Adapters in llama.cpp's format: one GGUF file with a pair of tensors for each matrix that they change.

`blk.0.attn_q.weight.lora_a` is A and `.lora_b` B, [rank, K] and [N, rank], under the names, and with rows in the order,
that the matrices have in GGUF files of models (`checkpoint/gguf/names.py`); of token_embd.weight A is turned. What is
added is alpha / rank (1, if there is no alpha or it is 0) times B A, as llama.cpp has it
(https://github.com/ggml-org/llama.cpp, src/llama-adapter.cpp, convert_lora_to_gguf.py). Raises AdapterError throughout.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.header import GgufHeader, GgufTensor, kind_name, read_gguf_header
from quire.checkpoint.gguf.names import Names, Piece, Source, rows_of
from quire.errors import AdapterError, UnsupportedModelError
from quire.kernels.quantized import QuantizedWeight, RowKind, RowLayout
from quire.layers import Embedding, Linear, PagedAttention
from quire.lora.base import Base
from quire.lora.files import Parts, opened
from quire.lora.peft_config import MAX_RANK
from quire.lora.targets import Naming, Rank, Targets
from quire.models.base import CausalLM

SUFFIX = ".gguf"
_A, _B = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_MOST_ALPHA = 1e9
_KINDS = {int(kind) for kind in RowKind if kind < 1000}
# Keys that say nothing of the arithmetic; those of `_settings` do.
_NOTES = ("general.", "adapter.lora.task_name", "quantize.")
_REFUSED = {
    "adapter.alora.invocation_tokens": "an activated LoRA, which begins to work behind some tokens of a prompt",
    "adapter.lora.prompt_prefix": "a text that every prompt must begin with, which nobody would put there",
}
# What transformers calls models whose GGUF files are another's: `FAMILIES` has one name for each.
_ALSO = {
    "llama": ("mistral", "mixtral"), "olmo2": ("olmo3",), "granitemoe": ("granitemoeshared",),
    "deepseek2": ("deepseek_v3", "youtu", "glm4_moe_lite"), "gemma3": ("gemma3",), "mistral3": ("ministral3",),
    "qwen2vl": ("qwen2_vl_text", "qwen2_5_vl_text"), "qwen3vl": ("qwen3_vl_text",),
    "qwen3vlmoe": ("qwen3_vl_moe_text",),
}  # fmt: skip
# Families whose pairs mean something else -> why.
_TURNED = "llama.cpp's converter turns their A and B, and what they mean cannot be told"
_FROM_FOLDERS = {
    "gpt2": _TURNED, "starcoder": _TURNED,
    "falcon-h1": "llama.cpp's converter multiplies them by the model's numbers, or it does not: no key says it",
}  # fmt: skip

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by the matrix's tensor


def is_gguf(path: Path) -> bool:
    """Whether an adapter's path is a GGUF file, and no folder."""
    return path.suffix.lower() == SUFFIX and path.is_file()


@dataclass(frozen=True)
class GgufAdapter:
    """What a file says. alpha: 0: shares are added as they are. tensors: by name."""

    where: str
    architecture: str
    alpha: float
    tensors: Mapping[str, GgufTensor]


@contextmanager
def gguf_adapter(path: Path, most: int) -> Iterator[tuple[BufferedReader, GgufAdapter]]:
    """The open file, of at most `most` bytes, and what it says of itself."""
    with opened(path, most) as (file, size):
        try:
            header = read_gguf_header(file, size)
        except ValueError as error:
            raise AdapterError(f"{path}: is damaged or no GGUF file: {error}.") from None
        yield file, _checked(header, str(path))


def _checked(header: GgufHeader, where: str) -> GgufAdapter:
    found = header.metadata
    for key, why in _REFUSED.items():
        if key in found:
            raise AdapterError(f"{where}: has {key}: it is {why}, and is not served.")
    kinds = found.get("general.type"), found.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise AdapterError(
            f"{where}: general.type is {_short(kinds[0])} and adapter.type {_short(kinds[1])}: only files of adapters "
            "('adapter', 'lora') are adapters."
        )
    architecture = found.get("general.architecture")
    if not isinstance(architecture, str):
        raise AdapterError(f"{where}: general.architecture, which says what model it is for, is not there.")
    alpha = found.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not -_MOST_ALPHA <= alpha <= _MOST_ALPHA:
        raise AdapterError(
            f"{where}: adapter.lora.alpha is {_short(alpha)}: it must be a number up to {_MOST_ALPHA:g}."
        )
    for key in found:
        if not key.startswith(_NOTES) and key not in ("adapter.type", "adapter.lora.alpha"):
            raise AdapterError(f"{where}: the key {key[:80]} is not served, and ignoring it could give wrong answers.")
    if not header.tensors:
        raise AdapterError(f"{where}: holds no tensors.")
    return GgufAdapter(where, architecture, alpha, header.tensors)


def _short(value: Any) -> str:
    return repr(value)[:80]


def described(adapter: GgufAdapter) -> dict[str, torch.Tensor]:
    """The file's tensors, of shape alone."""
    return {name: torch.empty(one.shape, device="meta") for name, one in adapter.tensors.items()}


def read_numbers(file: BufferedReader, adapter: GgufAdapter) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The SHA-256 of the open file, and its tensors as float32."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    data = bytearray(file.read(size))
    try:
        again = read_gguf_header(io.BytesIO(data), len(data))
    except ValueError:
        again = None
    if again is None or _checked(again, adapter.where) != adapter:
        raise AdapterError(f"{adapter.where}: has changed while it was read.")
    return hashlib.sha256(data).digest(), {name: _numbers(data, one) for name, one in adapter.tensors.items()}


def _numbers(data: bytearray, tensor: GgufTensor) -> torch.Tensor:
    layout = RowLayout(RowKind(tensor.kind), tensor.shape[-1])
    rows = torch.frombuffer(data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start)
    return QuantizedWeight(rows.view(-1, layout.row_bytes), layout).dequantize().view(tensor.shape)


def pairs_of(adapter: GgufAdapter, tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """The tensors two by two, of whole ranks."""
    others = [name for name in tensors if not name.endswith((_A, _B))]
    if others:
        raise AdapterError(
            f"{adapter.where}: has {_listed(others)}: neither A nor B of a pair. (llama.cpp leaves norms out that "
            "mergekit writes; the answers are those of another model then.)"
        )
    alone = [name for name in tensors if _other(name) not in tensors]
    if alone:
        raise AdapterError(f"{adapter.where}: of {_listed(alone)} the other half of the pair is missing.")
    for name, tensor in adapter.tensors.items():
        if tensor.kind not in _KINDS:
            served = ", ".join(kind_name(kind) for kind in sorted(_KINDS))
            raise AdapterError(f"{adapter.where}: {name} is of kind {kind_name(tensor.kind)}; served are {served}.")
    names = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
    pairs = {name: (tensors[name + _A], tensors[name + _B]) for name in names}
    for name, (a, b) in pairs.items():
        if name == _EMBEDDING and a.dim() == 2:
            a = a.t()
            pairs[name] = a, b
        if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
            raise AdapterError(
                f"{adapter.where}: {name} has lora_a of shape {list(tensors[name + _A].shape)} and lora_b of shape "
                f"{list(tensors[name + _B].shape)}, which are no pair: of one rank, A [rank, K] and B [N, rank]."
            )
        if a.shape[-2] > MAX_RANK:
            raise AdapterError(f"{adapter.where}: {name} has rank {a.shape[-2]:,}, and {MAX_RANK:,} is the largest.")
    return pairs


def _other(name: str) -> str:
    return name.removesuffix(_A) + _B if name.endswith(_A) else name.removesuffix(_B) + _A


def bound_pairs(adapter: GgufAdapter, base: Base, pairs: Pairs) -> tuple[dict[str, Parts], Targets]:
    """The pairs by the model's own modules, as PEFT's files have them, and their ranks: all of them, or none."""
    model, where = base.model, adapter.where
    _check_architecture(adapter, model)
    try:
        names = Names(_as_file(adapter, model, pairs), _text_config(model).num_hidden_layers)
    except UnsupportedModelError as error:
        raise AdapterError(str(error)) from None
    parts: dict[str, Parts] = {}
    ranks: dict[str, Rank] = {}
    used: dict[str, set[int | None]] = {}
    for name, module in base.modules.items():
        if not isinstance(module, (Linear, Embedding)) or model.is_visual(name):
            continue
        source = names.source(f"{name.removeprefix('language_model.')}.weight")
        if source is None:
            continue
        if source.latent or source.added:
            raise AdapterError(
                f"{where}: {source.pieces[0].tensor} is a part of {name}, which takes them whole: take PEFT's folder."
            )
        for piece in source.pieces:
            used.setdefault(piece.tensor, set()).add(piece.expert)
        a, b = _joined(source, pairs, where)
        is_table = isinstance(module, Embedding)
        kinds = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        parts[name] = dict(zip(kinds, (a, b), strict=True))
        rank = pairs[source.pieces[0].tensor][0].shape[-2]
        ranks[name] = Rank(len(a), adapter.alpha / rank if adapter.alpha else 1.0, adapter.alpha or None)
    _check_all_taken(adapter, pairs, used)
    return parts, Targets(ranks, frozenset(), frozenset(), {})


def own_names(base: Base) -> Naming:
    """The naming of what `bound_pairs` gives: modules go by the model's own names."""
    modules = {name: name for name, module in base.modules.items() if isinstance(module, (Linear, Embedding))}
    return Naming(modules, {}, frozenset())


def _check_architecture(adapter: GgufAdapter, model: CausalLM) -> None:
    from quire.checkpoint.gguf.families import FAMILIES  # only here: most adapters are no such file

    family, kind = FAMILIES.get(adapter.architecture), _text_config(model).model_type
    kinds = () if family is None else (family.model_type, *_ALSO.get(adapter.architecture, ()))
    if kind not in kinds:
        raise AdapterError(
            f"{adapter.where}: general.architecture is {adapter.architecture[:80]!r}, and the model is a {kind!r}: it "
            "was trained on another base model."
        )
    why = _FROM_FOLDERS.get(adapter.architecture)
    if why is not None:
        raise AdapterError(
            f"{adapter.where}: adapters of {adapter.architecture!r} models are served from PEFT's folders alone: {why}."
        )


def _text_config(model: CausalLM) -> Any:
    return model.config.get_text_config()


def _as_file(adapter: GgufAdapter, model: CausalLM, pairs: Pairs) -> GgufFile:
    """A model's file that has the matrices of the pairs, and heads as the model has them."""
    parts = (part for module in model.modules() for part in vars(module).values())
    attention = next((part for part in parts if isinstance(part, PagedAttention)), None)
    if attention is None:
        raise AdapterError(
            f"{adapter.where}: the model has no layer that says how many heads it has: take PEFT's folder."
        )
    heads, groups, arch = attention.spec.num_heads, attention.spec.num_kv_heads, adapter.architecture
    metadata = {
        "general.architecture": arch, f"{arch}.attention.head_count": heads, f"{arch}.attention.head_count_kv": groups,
    }  # fmt: skip
    tensors = {name: GgufTensor(0, (*b.shape[:-1], a.shape[-1]), 0, 0) for name, (a, b) in pairs.items()}
    return GgufFile((Path(adapter.where),), metadata, tensors, {})


def _joined(source: Source, pairs: Pairs, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [R, K] and B [N, R] of a parameter; pairs of several tensors keep ranks of their own, one behind the other."""
    tensors = list(dict.fromkeys(piece.tensor for piece in source.pieces))
    try:
        ranks = {pairs[name][0].shape[-2] for name in tensors}
        if len(ranks) > 1:
            raise ValueError("they are one matrix here, and have different ranks")
        (rank,) = ranks
        columns = rank * len(tensors)
        firsts = [a if piece.expert is None else a[piece.expert] for piece, a in _of(source, pairs, tensors)]
        wide = []
        for piece in source.pieces:
            b, at = pairs[piece.tensor][1], rank * tensors.index(piece.tensor)
            own = b.new_zeros((*b.shape[:-1], columns))
            own[..., at : at + rank] = b
            wide.append(own)
        return torch.cat(firsts), rows_of(source)(*wide)
    except (IndexError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{where}: {', '.join(tensors)}: do not fit this model: {error}.") from None


def _of(source: Source, pairs: Pairs, tensors: list[str]) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Of each tensor, one of its pieces and A."""
    for name in tensors:
        yield next(piece for piece in source.pieces if piece.tensor == name), pairs[name][0]


def _check_all_taken(adapter: GgufAdapter, pairs: Pairs, used: Mapping[str, set[int | None]]) -> None:
    left = [name for name in pairs if name not in used]
    for name, experts in used.items():
        stacked = len(pairs[name][0]) if pairs[name][0].dim() == 3 else None
        if experts != ({None} if stacked is None else set(range(stacked))):
            raise AdapterError(f"{adapter.where}: {name} is of {stacked or 'no'} experts, and the model's differs.")
    if left:
        raise AdapterError(f"{adapter.where}: does not fit this model; of no use here: {_listed(left)}.")


def _listed(names: list[str], most: int = 10) -> str:
    return f"{len(names)} ({', '.join(sorted(name[:80] for name in names)[:most])}{', ...' * (len(names) > most)})"


__all__ = ["SUFFIX", "bound_pairs", "described", "gguf_adapter", "is_gguf", "own_names", "pairs_of", "read_numbers"]
