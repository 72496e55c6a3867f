"""CLIP (arXiv:2103.00020): a vector of a text, or of an image, in one space.

The text tower runs in the engine's pool, and is causal: a text's vector is that of its end token, projected. The image
tower is transformers', with quire's linear layers; the vector of an image is that of its class token, projected.

Configuration fields that shape the arithmetic: projection_dim; of text_config hidden_size, num_attention_heads,
intermediate_size, num_hidden_layers, hidden_act, layer_norm_eps, max_position_embeddings, vocab_size and eos_token_id;
of vision_config the same and image_size, patch_size and num_channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.layers import Embedding, LayerNorm, Linear, MergedLinear, PagedAttention
from quire.models.base import refuse
from quire.models.classic import PlainMLP
from quire.models.encoder import Sizes
from quire.models.pooling.base import PoolingModel
from quire.models.vision.base import MediaModel
from quire.models.vision.towers import TowerLinear, build_tower
from quire.pooling_types import PoolingKind, TowerPrompts
from quire.types import ForwardContext, KVCache, KVSpec, MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.models.vision.base import ImageInputs

# Until 2023 configurations said this of eos_token_id, which was not so: the end is the highest token then.
_WRONG_EOS = 2
_NO_TOKEN = 2**31 - 1  # of an image: no text has it
_VISION_SIZES = ("image_size", "patch_size", "num_channels", "num_hidden_layers", "hidden_size", "num_attention_heads",
                 "intermediate_size")  # fmt: skip


class TowerAttention(nn.Module):
    """By CLIP's names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (Linear(hidden, hidden) for _ in range(4))
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(sizes.attention())

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.out_proj(self.attend(self.qkv(x), ctx, cache))
        return y


class TowerLayer(nn.Module):
    """Pre-norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(sizes.hidden, sizes.eps)
        self.self_attn = TowerAttention(sizes)
        self.layer_norm2 = LayerNorm(sizes.hidden, sizes.eps)
        self.mlp = PlainMLP(("fc1", "fc2"), sizes.hidden, sizes.inner, sizes.activation)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, ctx: ForwardContext, cache: KVCache
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the layer before left to add."""
        attended = self.self_attn(self.layer_norm1(residual, x), ctx, cache)
        y: torch.Tensor = self.mlp(self.layer_norm2(residual, attended))
        return y


class TextEmbeddings(nn.Module):
    def __init__(self, text: PretrainedConfig, hidden: int) -> None:
        super().__init__()
        self.token_embedding = Embedding(text.vocab_size, hidden)
        self.position_embedding = Embedding(text.max_position_embeddings, hidden)


class TextTower(nn.Module):
    """Words and positions, layers, a norm. sizes: of `text`, the tower's configuration."""

    def __init__(self, text: PretrainedConfig, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = TextEmbeddings(text, sizes.hidden)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(TowerLayer(sizes) for _ in range(sizes.layers))})
        self.final_layer_norm = LayerNorm(sizes.hidden, sizes.eps)

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        """words: [T, C], of the table -> [T, C]."""
        residual, x = self.embeddings.position_embedding(ctx.positions, words), None
        layers: Any = self.encoder["layers"]
        for layer, cache in zip(layers, kv, strict=True):
            x = layer(residual, x, ctx, cache)
        y: torch.Tensor = self.final_layer_norm(residual, x)
        return y


class ClipTextModel(PoolingModel):
    """CLIP's text tower with its projection."""

    kind: PoolingKind = "last"
    image_token_id: int | None = None
    checkpoint_ignored: Sequence[str] = (r"text_model\.embeddings\.position_ids",)

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if self.convert != "embed":
            raise self.no_head()
        text = self.text_config(config)
        sizes = Sizes(
            text.hidden_size,
            text.num_attention_heads,
            text.intermediate_size,
            text.num_hidden_layers,
            text.hidden_act,
            text.layer_norm_eps,
        )
        self.text_model = TextTower(text, sizes)
        self.kv_spec = KVSpec.of(sizes.attention() for _ in range(sizes.layers))
        self.max_model_len = int(text.max_position_embeddings)
        self.add_projection(config)
        self.tower_prompts = self.prompts(text)._replace(image=self.image_token_id)

    @classmethod
    def text_config(cls, config: PretrainedConfig) -> PretrainedConfig:
        """The text tower's part of config.json."""
        text: PretrainedConfig = getattr(config, "text_config", config)
        return text

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(cls.text_config(config))

    def add_projection(self, config: PretrainedConfig) -> None:
        """Build what stands behind the row of a text's end."""
        self.text_projection = Linear(self.text_config(config).hidden_size, _width(config), bias=False)

    def prompts(self, text: PretrainedConfig) -> TowerPrompts:
        """What a prompt is to this model."""
        end = text.eos_token_id
        if type(end) is not int or not 0 <= end < text.vocab_size:
            refuse(text, "eos_token_id", "it must be a token of the vocabulary: its row is a text's vector")
        return TowerPrompts(end="highest" if end == _WRONG_EOS else end)

    @property
    def width(self) -> int:
        return _width(self.config)

    @property
    def vocab_size(self) -> int:
        return self.text_model.embeddings.token_embedding.num_embeddings

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.text_model.embeddings.token_embedding(input_ids)
        return words

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        y: torch.Tensor = self.text_model(embeddings, ctx, kv)
        return y

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.text_projection(rows, torch.float32)
        return y


class ClipModel(MediaModel, ClipTextModel):
    """CLIP: vectors of texts and of images, with both towers."""

    checkpoint_ignored: Sequence[str] = (r"(?:text|vision)_model\.embeddings\.position_ids", r"logit_(?:scale|bias)")
    vision_kind: ClassVar[str] = "clip_vision_model"
    image_token_id: int | None = _NO_TOKEN

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        vision: Any = config.vision_config
        self.vision_model = self.image_tower(vision)
        self.side = int(vision.image_size)
        self.feature_width = self.width

    def add_projection(self, config: PretrainedConfig) -> None:
        super().add_projection(config)
        self.visual_projection = TowerLinear(config.vision_config.hidden_size, _width(config), bias=False)

    @classmethod
    def image_tower(cls, vision: PretrainedConfig) -> nn.Module:
        """transformers' tower, with its pooling."""
        from transformers import AutoModel

        built = build_tower(lambda: AutoModel.from_config(vision))
        tower: nn.Module = getattr(built, "vision_model", built)  # before transformers 5
        return tower

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        vision = config.vision_config
        if vision.model_type != cls.vision_kind:
            refuse(config, "vision_config", f"its tower must be {cls.vision_kind!r}", vision.model_type)
        for field in _VISION_SIZES:
            if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
                refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
        if vision.hidden_size % vision.num_attention_heads:
            refuse(config, "vision_config.hidden_size", "it must be a multiple of num_attention_heads")
        if vision.patch_size > vision.image_size:
            refuse(config, "vision_config.patch_size", "it must not be larger than image_size")

    def is_visual(self, name: str) -> bool:
        return name.startswith(("vision_model.", "visual_projection")) or name == "vision_model"

    def image_layout(self, inputs: ImageInputs) -> MediaLayout:
        return self._layout(tuple(inputs["pixel_values"].shape[-3:]))

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> MediaLayout | None:
        return self._layout((3, *final))

    def given_layout(self, features: int) -> MediaLayout:
        raise ValueError("image_embeds: the vector of an image is what this model makes: give the image")

    def _layout(self, sides: tuple[int, ...]) -> MediaLayout:
        side = self.side
        if sides != (3, side, side):
            raise ValueError(f"the image processor makes {list(sides)} of it, and the tower takes [3, {side}, {side}]")
        return MediaLayout(1)

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        return self.project(self.vision_model(inputs["pixel_values"].to(self.dtype)).pooler_output)

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """The vector [1, width] of what the tower has pooled of an image, [1, C]."""
        y: torch.Tensor = self.visual_projection(pooled)
        return y


def _width(config: Any) -> int:
    """Numbers of a vector."""
    width = config.projection_dim
    if type(width) is not int or width < 1:
        refuse(config, "projection_dim", "it must be a whole number above 0")
    return int(width)
