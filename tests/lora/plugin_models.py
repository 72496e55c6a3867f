"""Two plug-ins whose layers see other rows than the step's tokens (docs/adding-a-model.md), and their oracles.

Qwen3 has a norm over each head of query and key. `Routed` is a Llama whose tokens go to two of four experts (as in
Mixtral, arXiv:2401.04088); the oracle's experts are torch's linear layers, which PEFT can adapt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as TheirQwen3

from quire.layers import Linear, MergedLinear, RMSNorm, gated_activation, gathered
from quire.models import llama
from quire.models.decoder import Biases, DecoderAttention
from quire.registry import Row
from quire.types import AttentionSpec
from tests.models import tiny

ROWS = tuple(
    Row(name, f"{__name__}:{name}", package="tests")
    for name in ("Qwen3ForCausalLM", "FlatForCausalLM", "RoutedForCausalLM", "LostForCausalLM")
)
_SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


# -- heads -------------------------------------------------------------------------------------------------------------


class Qwen3Attention(DecoderAttention):
    def __init__(self, config, spec, biases):
        super().__init__(config, spec, biases)
        self.q_norm = RMSNorm(spec.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, config.rms_norm_eps)

    def norm_heads(self, query, key):
        return self.q_norm(query), self.k_norm(key)  # [T, H, D], slices of the merged projection


class Qwen3ForCausalLM(llama.LlamaForCausalLM):
    attention_class: ClassVar = Qwen3Attention


class _FlatNorm(RMSNorm):
    def forward(self, residual: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(residual.reshape(-1, residual.shape[-1])).view(residual.shape)


class FlatAttention(Qwen3Attention):
    """Its norms' rows are heads, and nothing says so."""

    def __init__(self, config: Any, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.q_norm = _FlatNorm(spec.head_dim, config.rms_norm_eps)


class FlatForCausalLM(Qwen3ForCausalLM):
    attention_class = FlatAttention


def make_qwen3(folder: Path) -> Any:
    torch.manual_seed(3)
    model = TheirQwen3(Qwen3Config(**_SIZES, head_dim=8, architectures=["Qwen3ForCausalLM"])).eval()
    tiny.randomise(model)
    return save(model, folder)


# -- experts -----------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate_up = MergedLinear(self.w1, self.w3)
        self.activate = gated_activation(config.hidden_act)

    def forward(self, x):
        return self.w2(self.activate(self.gate_up(x)))


class Experts(nn.Module):
    def __init__(self, config, biases):
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_local_experts))

    def forward(self, x):
        shares, chosen = self.gate(x, torch.float32).softmax(-1).topk(self.chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            with gathered(rows):  # row i of what the expert sees is token rows[i]'s
                out[rows] += expert(x[rows]).float() * shares[rows, place].unsqueeze(1)
        return out.to(x.dtype)


class RoutedForCausalLM(llama.LlamaForCausalLM):
    mlp_class: ClassVar = Experts


class LostExperts(Experts):
    """Its experts' rows are some of the tokens, and nothing says which."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = torch.arange(len(x) - 1, -1, -1)
        return torch.cat([expert(x[some[:1]]) for expert in self.experts]).sum(0).expand(x.shape).contiguous()


class LostForCausalLM(RoutedForCausalLM):
    mlp_class = LostExperts


class TheirExpert(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TheirExperts(nn.Module):
    """Each expert sees every token, and what was not asked for counts nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(TheirExpert(config) for _ in range(config.num_local_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        least = shares.topk(self.chosen).values[..., -1:]
        shares = shares.masked_fill(shares < least, 0)
        shares = shares / shares.sum(-1, keepdim=True)
        return sum(expert(x) * shares[..., n : n + 1] for n, expert in enumerate(self.experts))


def make_routed(folder: Path) -> Any:
    torch.manual_seed(4)
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "architectures": ["RoutedForCausalLM"]}
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, **fields)).eval()
    for layer in model.model.layers:
        layer.mlp = TheirExperts(model.config)
    tiny.randomise(model)
    return save(model, folder)


def save(model: Any, folder: Path) -> Any:
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    return model
