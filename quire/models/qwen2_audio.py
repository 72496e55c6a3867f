"""Qwen2-Audio (arXiv:2407.10759): Whisper's encoder (arXiv:2212.04356), pooled and projected, in front of a Qwen2.

A sound has a feature for each 40 ms, and one of 30 s at most is heard. Configuration fields that shape the arithmetic:
audio_config (d_model, encoder_layers, encoder_attention_heads, encoder_ffn_dim, num_mel_bins, max_source_positions,
activation_function), text_config (any text model of the registry), audio_token_index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from quire import kernels
from quire.errors import CheckpointError
from quire.layers import LayerNorm, Linear, activation
from quire.models.base import refuse
from quire.models.vision.base import MediaInputs, VisionLanguageModel, text_model
from quire.types import MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EPS = 1e-5  # of torch's norms, which no configuration changes
_BLOCK = 16  # keys of a block, as attention takes them
_TAPS = 3  # frames that a convolution sees
_SIZES = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins",
          "max_source_positions")  # fmt: skip


class Qwen2AudioForConditionalGeneration(VisionLanguageModel):
    token_id_fields: ClassVar = {"audio": "audio_token_id"}
    # Hugging Face's names before release 5, and since then.
    own_renames: ClassVar = ((r"(?:model\.)?((?:audio_tower|multi_modal_projector)\..+)", r"\1"),)
    published_parts: ClassVar = {
        "audio_tower": ("audio_tower", "model.audio_tower"),
        "multi_modal_projector": ("multi_modal_projector", "model.multi_modal_projector"),
        "language_model.{base}": ("language_model.{base}", "model.language_model"),
        "language_model.lm_head": ("language_model.lm_head", "lm_head"),
    }

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        audio = config.audio_config
        self.audio_tower = AudioTower(audio)
        self.multi_modal_projector = AudioProjector(audio.d_model, config.text_config.hidden_size)
        self.most_frames: int = 2 * audio.max_source_positions
        self.mel_bins: int = audio.num_mel_bins
        self.adopt(text_model(config))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        audio = config.audio_config
        if audio.model_type != "qwen2_audio_encoder":
            refuse(config, "audio_config", "its tower must be 'qwen2_audio_encoder'", audio.model_type)
        for field in _SIZES:
            value = getattr(audio, field)
            if type(value) is not int or value < 1:
                refuse(config, f"audio_config.{field}", "it must be a whole number above 0", value)
        if audio.d_model % audio.encoder_attention_heads:
            refuse(config, "audio_config.encoder_attention_heads", "it must divide d_model",
                   audio.encoder_attention_heads)  # fmt: skip

    def check_audio_processor(self, settings: Mapping[str, Any]) -> None:
        frames = settings["n_samples"] // settings["hop_length"]
        if settings["feature_size"] != self.mel_bins or frames != self.most_frames:
            raise CheckpointError(
                f"the feature extractor makes {settings['feature_size']} x {frames} of a sound, and config.json's "
                f"audio_config takes {self.mel_bins} x {self.most_frames} (num_mel_bins, twice max_source_positions)."
            )

    def audio_layout(self, inputs: MediaInputs) -> MediaLayout:
        features = _positions(inputs) // 2
        if features < 1:
            raise ValueError("it is too short: this model hears 3 frames (30 ms) at least")
        return MediaLayout(features)

    def encode_audio(self, inputs: MediaInputs) -> torch.Tensor:
        """Of the frames that are no padding, and no others: the tower's mask hides these from one another."""
        positions = _positions(inputs)
        # The second convolution sees frames up to this one, be they silence; behind the last of all, zeros.
        frames = inputs["input_features"][0].T[: 2 * positions + 1]
        return self.multi_modal_projector(self.audio_tower(frames, positions))


def _positions(inputs: MediaInputs) -> int:
    """How many the tower's layers see: one for two frames."""
    return (int(inputs["feature_attention_mask"].sum()) - 1) // 2 + 1


class AudioTower(nn.Module):
    """Whisper's encoder, with pairs of states made one before its last norm."""

    def __init__(self, audio: PretrainedConfig) -> None:
        super().__init__()
        size = audio.d_model
        self.conv1 = FrameConvolution(audio.num_mel_bins, size, stride=1)
        self.conv2 = FrameConvolution(size, size, stride=2)
        self.embed_positions = Positions(audio.max_source_positions, size)
        self.layers = nn.ModuleList(AudioLayer(audio) for _ in range(audio.encoder_layers))
        self.layer_norm = LayerNorm(size, _EPS)
        self.activate = activation("gelu")

    def forward(self, frames: torch.Tensor, positions: int) -> torch.Tensor:
        """[2 * positions + 1, bins], or fewer at the end of all -> [positions // 2, C]."""
        x = frames.to(self.embed_positions.weight.dtype)
        x = self.activate(self.conv1(x, 2 * positions))
        x = self.activate(self.conv2(x, positions)) + self.embed_positions.weight[:positions]
        for layer in self.layers:
            x = layer(x)
        pairs = x[: positions // 2 * 2].unflatten(0, (-1, 2))
        return self.layer_norm((pairs[:, 0] + pairs[:, 1]) / 2)


class Positions(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size), requires_grad=False)


class AudioLayer(nn.Module):
    def __init__(self, audio: PretrainedConfig) -> None:
        super().__init__()
        size = audio.d_model
        self.self_attn = AudioAttention(size, audio.encoder_attention_heads)
        self.self_attn_layer_norm = LayerNorm(size, _EPS)
        self.fc1 = Linear(size, audio.encoder_ffn_dim)
        self.fc2 = Linear(audio.encoder_ffn_dim, size)
        self.final_layer_norm = LayerNorm(size, _EPS)
        self.activate = activation(audio.activation_function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        x = x + self.fc2(self.activate(self.fc1(self.final_layer_norm(x))))
        if x.dtype is torch.float16:  # as in Whisper: what leaves its range stays a number
            most = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-most, most)
        return x


class AudioAttention(nn.Module):
    """All positions see all, by the kernel that text goes through: a sum's order depends on the keys alone."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, size // heads
        self.q_proj = Linear(size, size)
        self.k_proj = Linear(size, size, bias=False)
        self.v_proj = Linear(size, size)
        self.out_proj = Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        count = len(x)
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": x.device}
        table = torch.arange(-(-count // _BLOCK), **numbers)[None]
        attended = kernels.paged_attention(
            self.q_proj(x).view(count, self.heads, self.head_dim),
            self._blocks(self.k_proj(x)),
            self._blocks(self.v_proj(x)),
            table,
            torch.tensor([0, count], **numbers),
            torch.tensor([count], **numbers),
            self.head_dim**-0.5,
            visible_end=torch.full((count,), count, **numbers),
        )
        return self.out_proj(attended.flatten(1))

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [blocks, heads, keys of a block, size of a head], filled up with zeros, which nobody reads."""
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
        return filled.view(-1, _BLOCK, self.heads, self.head_dim).transpose(1, 2).contiguous()


class FrameConvolution(nn.Module):
    """A convolution over three frames, as one matrix product: a row's sum does not depend on the other rows."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, channels, _TAPS), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out), requires_grad=False)
        self.stride = stride

    def forward(self, frames: torch.Tensor, count: int) -> torch.Tensor:
        """[T, channels] -> [count, out]: the first results; before the first frame and behind the last are zeros."""
        missing = (count - 1) * self.stride + _TAPS - 1 - len(frames)
        padded = functional.pad(frames, (0, 0, 1, max(0, missing)))
        windows = padded.unfold(0, _TAPS, self.stride)[:count].flatten(1).contiguous()
        return kernels.linear(windows, [self.weight.flatten(1)], [self.bias])


class AudioProjector(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.linear = Linear(channels, out)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features)
