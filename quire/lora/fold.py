"""One module's tensors in an adapter's file -> what the adapter changes there. The formulas are PEFT's.

LoRA: arXiv:2106.09685; rank-stabilised scaling: arXiv:2312.03732; DoRA: arXiv:2402.09353. DoRA's column scale needs
the norms of W + scaling B A, which are computed here, once. Raises ValueError for tensors that do not fit the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quire.kernels.adapters import LoraWeights, pack, unpack
from quire.layers import Embedding, LayerNorm, Linear, RMSNorm
from quire.layers.adapters import EmbeddingChange, LinearChange, NormChange, TokenRows
from quire.lora.files import Parts
from quire.lora.targets import Rank

Given = Mapping[str, torch.Tensor | None]  # leaf name of a parameter -> what replaces it
_PIECE = 1 << 22  # elements of W that are worked on at a time


def linear_change(
    layer: Linear, rank: Rank | None, parts: Parts, given: Given, tokens: TokenRows | None, dtype: torch.dtype
) -> LinearChange:
    weight, trained, own = given.get("weight"), given.get("bias"), _host(layer._parameters.get("bias"))
    bias = own if trained is None else trained
    replaced = own if weight is None else bias  # what is in the product already
    scale = shift = None
    if "lora_magnitude_vector" in parts:
        norms = _row_norms(layer, weight, parts, rank)
        scale = _shaped(parts["lora_magnitude_vector"], [layer.out_features], "lora_magnitude_vector").float() / norms
    if bias is not None and (scale is not None or bias is not replaced):
        assert replaced is not None
        shift = bias.float() - (replaced.float() if scale is None else replaced.float() * scale)
    if "lora_B.bias" in parts:
        assert rank is not None
        added = _shaped(parts["lora_B.bias"], [layer.out_features], "lora_B.bias").float() * rank.scaling
        shift = added if shift is None else shift + added
    lora = None
    if rank is not None and "lora_A.weight" in parts:
        a = _shaped(parts["lora_A.weight"], [rank.rank, layer.in_features], "lora_A.weight")
        b = _shaped(parts["lora_B.weight"], [layer.out_features, rank.rank], "lora_B.weight")
        lora = LoraWeights(a.to(dtype).contiguous(), pack(b.to(dtype)), rank.scaling, scale, shift)
    elif shift is not None:
        lora = LoraWeights(None, None, 1.0, None, shift)
    if tokens is not None:
        tokens = _with_lora(tokens, lora, replaced, layer.out_features)
    return LinearChange(lora, weight, None if weight is None else bias, tokens)


def scaled_change(change: LinearChange | None, scale: torch.Tensor) -> LinearChange:
    """What an adapter changes in a layer (None: nothing), and then multiplies its rows by: scale [N] float32."""
    change = LinearChange() if change is None else change
    lora = LoraWeights(None, None) if change.lora is None else change.lora
    shift = None if lora.shift is None else lora.shift * scale
    scale = scale if lora.scale is None else lora.scale * scale
    return replace(change, lora=replace(lora, scale=scale, shift=shift))


def _with_lora(tokens: TokenRows, lora: LoraWeights | None, bias: torch.Tensor | None, columns: int) -> TokenRows:
    """Trained rows of a Linear, and what is added to the product with them: LoRA comes on top, as in PEFT."""
    ids = tokens.ids
    if lora is not None:
        scale, shift = (None if part is None else part[ids] for part in (lora.scale, lora.shift))
        b = None if lora.b is None else pack(unpack(lora.b, columns)[ids])
        lora = LoraWeights(lora.a, b, lora.scaling, scale, shift)
    return TokenRows(ids, tokens.rows, None if bias is None else bias.detach()[ids], lora)


def embedding_change(
    layer: Embedding, rank: Rank | None, parts: Parts, given: Given, tokens: TokenRows | None, dtype: torch.dtype
) -> EmbeddingChange:
    if layer.unadapted:
        raise ValueError(layer.unadapted)
    weight = given.get("weight")
    if rank is None or "lora_embedding_A" not in parts:
        return EmbeddingChange(weight, tokens)
    rows, size = layer.num_embeddings, layer.size
    a = _shaped(parts["lora_embedding_A"], [rank.rank, rows], "lora_embedding_A")
    b = _shaped(parts["lora_embedding_B"], [size, rank.rank], "lora_embedding_B")
    scale = None
    if "lora_magnitude_vector" in parts:
        magnitude = _shaped(parts["lora_magnitude_vector"], [size], "lora_magnitude_vector").float()
        scale = magnitude / _column_norms(layer, weight, a, b, rank.scaling)
    return EmbeddingChange(weight, tokens, a.t().to(dtype).contiguous(), b.to(dtype).contiguous(), rank.scaling, scale)


def norm_change(layer: RMSNorm | LayerNorm, given: Given, dtype: torch.dtype) -> NormChange:
    own = {leaf: _host(parameter) for leaf, parameter in layer._parameters.items()}
    found = {leaf: own.get(leaf) if given.get(leaf) is None else given[leaf] for leaf in ("weight", "bias")}
    return NormChange(found["weight"], found["bias"])


def token_rows(ids: Sequence[int], rows: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> TokenRows:
    """Trained rows, in the order of their ids. shape: the table's."""
    count, size = shape
    _shaped(rows, [len(ids), size], "token_adapter.trainable_tokens_delta")
    if ids and max(ids) >= count:
        raise ValueError(f"trainable_token_indices has {max(ids)}, and the table ends at {count - 1}")
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    chosen = torch.tensor([ids[place] for place in order], dtype=torch.int64)
    return TokenRows(chosen, rows[order].to(dtype))


def changed_parameter(
    own: Mapping[str, nn.Parameter | None], rank: Rank | None, parts: Parts, given: Given, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The parameters of a module that is none of quire's layers (a tower's convolution), LoRA added to the weight.

    own: the base model's.
    """
    changed = {leaf: tensor for leaf, tensor in given.items() if tensor is not None}
    if rank is None or not parts:
        return changed
    base = changed.get("weight", _host(own.get("weight")))
    if base is None or base.dim() < 2:
        raise ValueError("it takes no LoRA")
    if "lora_embedding_A" in parts:
        a = _shaped(parts["lora_embedding_A"], [rank.rank, base.shape[0]], "lora_embedding_A")
        b = _shaped(parts["lora_embedding_B"], [base.shape[1], rank.rank], "lora_embedding_B")
        total = base.float() + (b.float() @ a.float()).t() * rank.scaling
        norms = total.norm(dim=0)
    else:
        a = _shaped(parts["lora_A.weight"], [rank.rank, *base.shape[1:]], "lora_A.weight")
        ones = [1] * (base.dim() - 2)
        b = _shaped(parts["lora_B.weight"], [base.shape[0], rank.rank, *ones], "lora_B.weight")
        delta = b.flatten(1).float() @ a.flatten(1).float()
        total = base.float() + delta.view(base.shape) * rank.scaling
        norms = total.flatten(1).norm(dim=1).view(-1, *[1] * (base.dim() - 1))
    if "lora_magnitude_vector" in parts:
        magnitude = parts["lora_magnitude_vector"].float()
        if magnitude.numel() != norms.numel():
            raise ValueError(f"lora_magnitude_vector has {magnitude.numel()} numbers, not {norms.numel()}")
        total = total * (magnitude.reshape(norms.shape) / norms)
    if "lora_B.bias" in parts:
        bias = changed.get("bias", _host(own.get("bias")))  # or the layer has none until now
        added = _shaped(parts["lora_B.bias"], [base.shape[0]], "lora_B.bias").float() * rank.scaling
        changed["bias"] = (added if bias is None else bias.float() + added).to(dtype)
    return {**changed, "weight": total.to(dtype)}


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter of the model's, which may lie on a GPU, where adapters are read."""
    return None if tensor is None else tensor.detach().cpu()


def _shaped(tensor: torch.Tensor, shape: list[int], what: str) -> torch.Tensor:
    if list(tensor.shape) != shape:
        raise ValueError(
            f"{what} has shape {list(tensor.shape)}, and model and configuration ask for {shape}: it was trained on "
            "another base model, or its configuration is not its own"
        )
    return tensor


def _row_norms(layer: Linear, weight: torch.Tensor | None, parts: Parts, rank: Rank | None) -> torch.Tensor:
    """The length of each row of W + scaling B A, [N] float32. weight: in the place of the layer's own."""
    assert rank is not None
    _shaped(parts["lora_A.weight"], [rank.rank, layer.in_features], "lora_A.weight")
    _shaped(parts["lora_B.weight"], [layer.out_features, rank.rank], "lora_B.weight")
    a, b = parts["lora_A.weight"].float(), parts["lora_B.weight"].float() * rank.scaling
    step = max(1, _PIECE // layer.in_features)
    pieces = []
    for at in range(0, layer.out_features, step):
        end = min(at + step, layer.out_features)
        own = layer.format.rows(layer, at, end) if weight is None else weight[at:end].float()
        delta = b[at:end].to(own.device) @ a.to(own.device)  # which are far smaller than the weight
        pieces.append((own + delta).norm(dim=1))
    return torch.cat(pieces).cpu()


def _column_norms(
    layer: Embedding, weight: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The length of each column of W + scaling (B A)^T, W [V, C]: [C] float32. weight: in the place of the layer's."""
    device = layer.weight.device
    a, b = (a.float().t()).to(device), (b.float().t() * scaling).to(device)
    step = max(1, _PIECE // layer.size)
    squares = torch.zeros(layer.size, device=device)
    for at in range(0, layer.num_embeddings, step):
        end = min(at + step, layer.num_embeddings)
        own = layer.rows(at, end) if weight is None else weight[at:end].float().to(device)
        squares += (own + a[at:end] @ b).square().sum(dim=0)
    return squares.sqrt().cpu()
