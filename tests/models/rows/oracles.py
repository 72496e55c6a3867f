"""Models that transformers has no class for, in plain torch on its Llama: to compare with, and for PEFT to adapt.

Parts are named as in the published files. `test_oracles.py` compares them with transformers' own relatives.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


def causal(scores: torch.Tensor) -> torch.Tensor:
    """scores: [batch, heads, T, T]; what is ahead is hidden."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """[batch, heads, T, size] each -> [batch, T, heads * size]; bias: [heads, 1, T], added to the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = causal(query @ key.mT / math.sqrt(query.shape[-1]) + bias)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def heads_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """[batch, T, heads * size] -> [batch, heads, T, size]"""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def slopes_of(heads: int) -> list[float]:
    """As the authors of ALiBi write them (arXiv:2108.12409)."""
    if math.log2(heads).is_integer():
        start = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
        return [start * start**i for i in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return slopes_of(fewer) + slopes_of(2 * fewer)[0::2][: heads - fewer]


class Published(PreTrainedModel):
    """A model saved with a config.json of the family's own fields."""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        super().save_pretrained(save_directory, **options)
        (Path(save_directory) / "config.json").write_text(json.dumps(self.published))


class BaichuanAttention(nn.Module):
    def __init__(self, config: LlamaConfig, alibi: bool) -> None:
        super().__init__()
        self.heads, self.alibi = config.num_attention_heads, alibi
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **rest: Any) -> Any:
        tokens, size = hidden_states.shape[1], hidden_states.shape[2] // self.heads
        query, key, value = (heads_of(part, size) for part in self.W_pack(hidden_states).chunk(3, -1))
        bias: torch.Tensor | float = 0.0
        if self.alibi:
            slopes = torch.tensor(slopes_of(self.heads), dtype=query.dtype)
            bias = slopes.view(-1, 1, 1) * torch.arange(tokens, dtype=query.dtype)
        else:
            cos, sin = (part.unsqueeze(1) for part in position_embeddings)
            query, key = (
                x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin for x in (query, key)
            )
        return self.o_proj(attend(query, key, value, bias)), None


class NormHead(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.normalize(self.weight))


class BaichuanForCausalLM(Published, LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        alibi = "max_position_embeddings" not in config.published
        for layer in self.model.layers:
            layer.self_attn = BaichuanAttention(config, alibi)
        if "z_loss_weight" in config.published:
            self.lm_head = NormHead(config.hidden_size, config.vocab_size, bias=False)
        self.published = config.published


def baichuan(settings: dict[str, Any]) -> BaichuanForCausalLM:
    published = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **settings}
    config = LlamaConfig(**settings, attn_implementation="eager")
    config.published = published
    return BaichuanForCausalLM(config)


class ChatGLMAttention(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.fields, hidden, size = fields, fields["hidden_size"], fields["kv_channels"]
        heads, groups = fields["num_attention_heads"], fields["multi_query_group_num"]
        self.widths = [heads * size, groups * size, groups * size]
        self.query_key_value = nn.Linear(hidden, sum(self.widths), bias=fields["add_qkv_bias"])
        self.dense = nn.Linear(heads * size, hidden, bias=fields["add_bias_linear"])

    def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
        size, tokens = self.fields["kv_channels"], hidden_states.shape[1]
        parts = self.query_key_value(hidden_states).split(self.widths, -1)
        query, key, value = (heads_of(part, size) for part in parts)
        query, key = (self.turn(x, torch.arange(tokens)) for x in (query, key))
        return self.dense(attend(query, key, value)), None

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The first half of a head, each pair of neighbours as a complex number."""
        turned = x.shape[-1] // 2
        theta = 1.0 / (10000 * self.fields.get("rope_ratio", 1)) ** (torch.arange(0, turned, 2).double() / turned)
        angles = positions.double().unsqueeze(1) * theta
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., :turned:2], x[..., 1:turned:2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        return torch.cat((pairs, x[..., turned:]), -1)


class ChatGLMMLP(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, bias = fields["hidden_size"], fields["ffn_hidden_size"], fields["add_bias_linear"]
        self.dense_h_to_4h = nn.Linear(hidden, 2 * inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class ChatGLMBlock(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(fields["hidden_size"], fields["layernorm_epsilon"])
        self.self_attention = ChatGLMAttention(fields)
        self.post_attention_layernorm = LlamaRMSNorm(fields["hidden_size"], fields["layernorm_epsilon"])
        self.mlp = ChatGLMMLP(fields)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class ChatGLMModel(Published):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        fields = self.published = config.published
        vocab, hidden = fields["padded_vocab_size"], fields["hidden_size"]
        encoder = nn.ModuleDict({
            "layers": nn.ModuleList(ChatGLMBlock(fields) for _ in range(fields["num_layers"])),
            "final_layernorm": LlamaRMSNorm(hidden, fields["layernorm_epsilon"]),
        })  # fmt: skip
        self.transformer = nn.ModuleDict({
            "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, hidden)}),
            "encoder": encoder,
            "output_layer": nn.Linear(hidden, vocab, bias=False),
        })  # fmt: skip
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.output_layer

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> CausalLMOutput:
        x = self.get_input_embeddings()(input_ids)
        for block in self.transformer.encoder.layers:
            x = block(x)
        return CausalLMOutput(logits=self.get_output_embeddings()(self.transformer.encoder.final_layernorm(x)))


def chatglm(settings: dict[str, Any]) -> ChatGLMModel:
    config = LlamaConfig(vocab_size=settings["padded_vocab_size"], hidden_size=settings["hidden_size"])
    config.published = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", **settings}
    return ChatGLMModel(config)


class MiniCPM(GraniteForCausalLM):
    """Granite's multipliers are MiniCPM's, under other names."""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        super().save_pretrained(save_directory, **options)
        (Path(save_directory) / "config.json").write_text(json.dumps(self.config.published))


def minicpm(settings: dict[str, Any]) -> MiniCPM:
    shared = {
        name: value for name, value in settings.items() if name not in ("scale_emb", "scale_depth", "dim_model_base")
    }
    config = GraniteConfig(
        **shared,
        embedding_multiplier=float(settings["scale_emb"]),
        attention_multiplier=(settings["hidden_size"] // settings["num_attention_heads"]) ** -0.5,
        residual_multiplier=settings["scale_depth"] / settings["num_hidden_layers"] ** 0.5,
        logits_scaling=settings["hidden_size"] / settings["dim_model_base"],
        attn_implementation="eager",
    )
    config.published = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", **settings}
    return MiniCPM(config)


class InternLM2Attention(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups = fields["num_attention_heads"], fields["num_key_value_heads"]
        self.size = fields["hidden_size"] // self.heads
        width = (self.heads + 2 * self.groups) * self.size
        self.wqkv = nn.Linear(fields["hidden_size"], width, bias=fields["bias"])
        self.wo = nn.Linear(self.heads * self.size, fields["hidden_size"], bias=fields["bias"])

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, tokens = x.shape[:2]
        parts = self.wqkv(x).view(batch, tokens, self.groups, -1, self.size)  # of a key head
        query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *turn)
        return self.wo(attend(query, key, value))


class InternLM2MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class InternLM2Block(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.attention = InternLM2Attention(fields)
        self.feed_forward = InternLM2MLP(fields["hidden_size"], fields["intermediate_size"])
        self.attention_norm, self.ffn_norm = (
            LlamaRMSNorm(fields["hidden_size"], fields["rms_norm_eps"]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM2(Published):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        fields = self.published = config.published
        self.turn = LlamaRotaryEmbedding(config)
        self.model = nn.ModuleDict({
            "tok_embeddings": nn.Embedding(fields["vocab_size"], fields["hidden_size"]),
            "layers": nn.ModuleList(InternLM2Block(fields) for _ in range(fields["num_hidden_layers"])),
            "norm": LlamaRMSNorm(fields["hidden_size"], fields["rms_norm_eps"]),
        })  # fmt: skip
        self.output = nn.Linear(fields["hidden_size"], fields["vocab_size"], bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> CausalLMOutput:
        x = self.get_input_embeddings()(input_ids)
        turn = self.turn(x, torch.arange(input_ids.shape[1]).unsqueeze(0))
        for block in self.model.layers:
            x = block(x, turn)
        return CausalLMOutput(logits=self.output(self.model.norm(x)))


def internlm2(settings: dict[str, Any]) -> InternLM2:
    config = LlamaConfig(**{name: value for name, value in settings.items() if name != "bias"})
    config.published = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", **settings}
    return InternLM2(config)
