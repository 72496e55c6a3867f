"""Sounds, files of them, and transformers' answers of models that hear. Models are made as in `tiny_vision`."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import create_bidirectional_mask

from tests.multimodal.families import HEARING
from tests.multimodal.families.audio import AUDIO
from tests.multimodal.families.family import VOCAB
from tests.multimodal.tiny_vision import build, image_processor, make

__all__ = ["ARCHITECTURE", "AUDIO", "CASES", "VOCAB", "Oracle", "asked", "build", "encoded", "one", "sound", "wav"]

ARCHITECTURE = "Qwen2AudioForConditionalGeneration"
CASES = [
    pytest.param(variant, marks=() if variant in (HEARING[ARCHITECTURE].quick or ()) else pytest.mark.slow)
    for variant in HEARING[ARCHITECTURE].variants
]


def sound(seed: int, seconds: float, rate: int = 16_000) -> np.ndarray:
    """Tones that come and go, [samples] float32."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    tones = [
        rng.uniform(0.05, 0.3) * np.sin(2 * np.pi * rng.uniform(100, 3000) * times + rng.uniform(0, 6))
        * (0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(1, 9) * times)) for _ in range(4)
    ]  # fmt: skip
    return (sum(tones) + 0.01 * rng.standard_normal(len(times))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, bits: int = 32, floats: bool = True) -> bytes:
    """A WAV file of [samples] or [samples, channels]; floats of 32 bits lose nothing."""
    frames = samples.reshape(len(samples), samples.shape[1] if samples.ndim > 1 else 1)
    if floats:
        data = frames.astype(f"<f{bits // 8}").tobytes()
    else:
        whole = np.round(frames.astype(np.float64) * 2.0 ** (bits - 1)).clip(
            -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
        )
        raw = (whole + 128 if bits == 8 else whole).astype("<i4").tobytes()
        data = np.frombuffer(raw, np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    size = frames.shape[1] * bits // 8
    form = struct.pack("<HHIIHH", 3 if floats else 1, frames.shape[1], rate, rate * size, size, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def encoded(samples: np.ndarray, form: str = "flac", codec: str = "flac", rate: int = 16_000) -> bytes:
    """A file made by PyAV of [samples]; FLAC loses nothing of samples of 16 bits."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        assert stream.format is not None
        resampler = av.AudioResampler(format=stream.format.name, layout="mono", rate=rate)
        pieces = av.AudioFifo()
        for piece in resampler.resample(frame) + resampler.resample(None):
            piece.pts = None
            pieces.write(piece)
        size, place = stream.codec_context.frame_size or 1024, 0
        while (piece := pieces.read(size, partial=True)) is not None:
            piece.pts, place = place, place + piece.samples
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def asked(ids: list[int], sounds: Any = (), **more: Any) -> dict[str, Any]:
    """A prompt with a marker for each sound."""
    return {"prompt_token_ids": list(ids), **({"multi_modal_data": {"audio": list(sounds)}} if sounds else {}), **more}


def one(given: Any, **more: Any) -> dict[str, Any]:
    return asked([5, 6, AUDIO, 7, 8], [given], **more)


class Oracle:
    """A variant in transformers: features, and greedy answers to prompts of ids with one marker a sound."""

    def __init__(self, variant: str, architecture: str = ARCHITECTURE) -> None:
        self.model = make(architecture, variant)
        self.extractor = image_processor(architecture, variant)
        self.rate: int = self.extractor.sampling_rate

    def inputs(self, sounds: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """As transformers' processor makes them."""
        found = self.extractor(
            sounds, sampling_rate=self.rate, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}

    def lengths(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions of the tower, features) of each sound."""
        return self.model.model.audio_tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))

    @torch.inference_mode()
    def features(self, samples: np.ndarray) -> torch.Tensor:
        """[features, E]"""
        inputs = self.inputs([samples])
        tower, (positions, features) = self.model.model.audio_tower, self.lengths(inputs)
        seen = torch.arange(inputs["input_features"].shape[-1] // 2)[None] < positions
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=torch.zeros(*seen.shape, 1), attention_mask=seen.long()
        )
        state = tower(inputs["input_features"], attention_mask=mask).last_hidden_state
        return self.model.model.multi_modal_projector(state)[0, : int(features)]

    @torch.inference_mode()
    def answer(self, ids: list[int], sounds: list[np.ndarray], tokens: int) -> tuple[list[int], list[int]]:
        """(expanded prompt, greedy tokens), run alone, in float64."""
        inputs = self.inputs(sounds) if sounds else {}
        counts = iter(self.lengths(inputs)[1].tolist() if sounds else [])
        expanded = [token for one in ids for token in ([one] * next(counts) if one == AUDIO else [one])]
        if sounds:
            inputs["input_features"] = inputs["input_features"].double()
        wide = self.model.double()
        try:
            out = wide.generate(
                input_ids=torch.tensor([expanded]), attention_mask=torch.ones(1, len(expanded), dtype=torch.int64),
                max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                **inputs,
            )  # fmt: skip
        finally:
            self.model.float()
        return expanded, out[0, len(expanded) :].tolist()
