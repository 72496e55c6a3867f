"""Samples to what a model's tower takes, by the checkpoint's own feature extractor (transformers', on torch's FFT)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.errors import CheckpointError, RequestError

# Whose samples become a log-mel spectrogram of one fixed length (Whisper, arXiv:2212.04356), with a mask.
EXTRACTORS = ("WhisperFeatureExtractor",)
_NAMES = ("truncation",)  # what a caller may set


class AudioProcessor:
    """Samples to what a tower takes. Any number of threads may call it at once.

    path: of the checkpoint. Raises CheckpointError where there is no feature extractor to load, or where it is not one
    of EXTRACTORS, or draws random numbers.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoFeatureExtractor

        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises all kinds
            raise CheckpointError(f"{path}: its feature extractor cannot be loaded: {error}") from error
        self.name = type(self._extractor).__name__
        if self.name not in EXTRACTORS:
            raise CheckpointError(
                f"{path}: sounds are prepared by {self.name}, which quire does not know; it knows "
                f"{', '.join(EXTRACTORS)}"
            )
        self.known = {**self._extractor.to_dict(), "n_samples": getattr(self._extractor, "n_samples", None)}
        for name in ("sampling_rate", "n_samples", "hop_length", "n_fft", "feature_size"):
            if type(getattr(self._extractor, name)) is not int or getattr(self._extractor, name) < 1:
                raise CheckpointError(f"{path}: its feature extractor's {name} must be a whole number above 0")
        if self.known.get("dither"):
            raise CheckpointError(
                f"{path}: its feature extractor has dither={self.known['dither']}: random numbers, so that no two "
                "answers would be the same; set it to 0.0"
            )
        self.rate: int = self._extractor.sampling_rate
        self.longest: int = self._extractor.n_samples
        self._settings: dict[str, Any] = {}
        known = json.dumps([self.name, self.known], sort_keys=True, default=repr)
        self._fingerprint = hashlib.sha256(known.encode()).digest()

    @property
    def setting_names(self) -> set[str]:
        """What a caller may set: truncation, whether only the beginning of a longer sound is taken."""
        return set(_NAMES)

    def keep(self, given: Mapping[str, Any]) -> None:
        """Have all requests begin with these. Raises RequestError for a wrong one."""
        self._settings = self.settings(given)

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's settings with a caller's on top. Raises RequestError for a wrong one."""
        for name, value in (given or {}).items():
            if name not in _NAMES:
                raise RequestError(
                    f"mm_processor_kwargs: {self.name} has no setting {str(name)[:40]!r}; it has {', '.join(_NAMES)}"
                )
            if type(value) is not bool:
                raise RequestError(f"mm_processor_kwargs: {name}={repr(value)[:100]} must be true or false")
        return {**self._settings, **(given or {})}

    def taken(self, seconds: float, settings: Mapping[str, Any]) -> float:
        """How many seconds are taken of a sound that has so many. Raises ValueError for more than the model hears."""
        longest = self.longest / self.rate
        # A file's length is known to a packet, and the extractor's is a number of samples.
        if seconds > longest + 0.5 / self.rate and not settings.get("truncation"):
            raise ValueError(
                f"it lasts {seconds:.2f} s, and this model hears {longest:g} s: cut it, or ask for its beginning alone "
                "by mm_processor_kwargs={'truncation': true}"
            )
        return min(seconds, longest)

    def digest(self, samples: np.ndarray) -> bytes:
        """The same for samples of which the model hears the same."""
        return hashlib.sha256(self._fingerprint + samples.astype("<f4").tobytes()).digest()

    def __call__(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        """What the tower takes of samples [at most `longest`] float32, as a batch of one: input_features
        [1, feature_size, frames] float32 and feature_attention_mask [1, frames], 1 where it is no padding."""
        found = self._extractor(
            samples, sampling_rate=self.rate, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
