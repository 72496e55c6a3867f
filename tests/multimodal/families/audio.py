"""Qwen2-Audio: (tower, text model, settings of the feature extractor) of each variant."""

from __future__ import annotations

from typing import Any

import transformers

from tests.multimodal.families.family import LLAMA, VOCAB, Family

AUDIO = VOCAB - 1  # the audio token's id

_TOWER = {
    "num_mel_bins": 20, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 36, "d_model": 24,
    "max_source_positions": 100,
}  # fmt: skip
_EXTRACTOR = {"feature_size": 20, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 2, "n_fft": 400}
_QWEN2 = ("Qwen2Config", LLAMA)
_GRANITE = (
    "GraniteConfig",
    {**LLAMA, "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
     "logits_scaling": 2.0},
)  # fmt: skip
_VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "plain": (_TOWER, _QWEN2, _EXTRACTOR),
    "one_head": (
        {**_TOWER, "encoder_attention_heads": 1, "encoder_ffn_dim": 7, "encoder_layers": 4, "d_model": 20},
        ("Qwen2Config", {**LLAMA, "num_key_value_heads": 4}),
        _EXTRACTOR,
    ),
    # 128 bins, as published; an odd number of positions.
    "published_bins": (
        {**_TOWER, "num_mel_bins": 128, "d_model": 40, "encoder_attention_heads": 5, "max_source_positions": 125},
        _QWEN2,
        {**_EXTRACTOR, "feature_size": 128, "sampling_rate": 8_000, "hop_length": 96, "chunk_length": 3, "n_fft": 1200},
    ),
    "relu": (
        {**_TOWER, "activation_function": "relu", "encoder_layers": 1, "max_source_positions": 125},
        ("LlamaConfig", LLAMA),
        {**_EXTRACTOR, "hop_length": 128, "n_fft": 300},
    ),
    "silu_granite": (
        {**_TOWER, "activation_function": "silu", "num_mel_bins": 13, "max_source_positions": 50},
        _GRANITE,
        {**_EXTRACTOR, "feature_size": 13, "chunk_length": 1},
    ),
    "windows": (
        {**_TOWER, "scale_embedding": True, "encoder_layers": 3, "max_source_positions": 90},
        ("MistralConfig", {**LLAMA, "sliding_window": 12, "head_dim": 8}),
        {**_EXTRACTOR, "sampling_rate": 12_000, "hop_length": 200, "chunk_length": 3},
    ),
}  # fmt: skip


def _config(variant: Any) -> Any:
    tower, (text, settings), _ = variant
    return transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**tower),
        text_config=getattr(transformers, text)(**settings),
        audio_token_index=AUDIO,
    )


def _extractor(variant: Any) -> Any:
    return transformers.WhisperFeatureExtractor(**variant[2])


FAMILIES = {
    "Qwen2AudioForConditionalGeneration": Family(
        _VARIANTS, _config, _extractor, quick=("plain", "published_bins"), words={AUDIO: "<|AUDIO|>"},
        blocks={"windows": 24},
    ),
}  # fmt: skip
