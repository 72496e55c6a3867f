"""The draft model that the settings name: found, checked against the model, and loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from quire.checkpoint.files import Hub, resolve_weights
from quire.config import EngineConfig
from quire.config.speculative import SpeculativeConfig, speculative
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.vision.base import VisionLanguageModel
from quire.types import STATE, KVSpec

logger = logging.getLogger("quire")


class DraftModel(NamedTuple):
    """path: its checkpoint. spec: what it asks of the pool."""

    model: CausalLM
    path: Path
    spec: KVSpec


def draft_model(
    config: EngineConfig, model: CausalLM, spec: KVSpec, max_model_len: int, device: torch.device
) -> DraftModel | None:
    """What is to propose tokens for a model; None: the settings name none. spec: of the model.

    Raises UnsupportedModelError, CheckpointError or QuireError, for a pair that cannot work together, too.
    """
    given = config.scheduler.speculative_config
    settings = None if given is None else speculative(given)
    if settings is None or settings.model is None:
        return None
    if device.type != "cpu":
        raise _refused(
            settings,
            f"draft models are served on CPUs alone, and the model is on {device}, where a step begins before the last "
            "one's tokens are known; take method 'ngram' or 'suffix', or device='cpu'",
        )
    _check_kept(settings, "the model", spec)
    path, draft = _load(config, settings, device)
    if isinstance(draft, VisionLanguageModel):
        raise _refused(settings, "it takes images or sounds, and a draft model reads tokens alone; take one of text")
    if draft.vocab_size != model.vocab_size:
        raise _refused(
            settings,
            f"it has {draft.vocab_size:,} tokens and the model {model.vocab_size:,}, so that ids need not mean the "
            "same; take one with the model's vocabulary",
        )
    if draft.max_model_len < max_model_len:
        raise _refused(
            settings,
            f"it has positions for {draft.max_model_len:,} tokens, and sequences may have {max_model_len:,}; give "
            f"max_model_len={draft.max_model_len}",
        )
    own = replace(draft.kv_spec.within(max_model_len), int8=spec.int8)
    _check_kept(settings, "it", own)
    logger.info("draft model: %s, %s", path, str(draft.dtype).removeprefix("torch."))
    return DraftModel(draft, path, own)


def _load(config: EngineConfig, settings: SpeculativeConfig, device: torch.device) -> tuple[Path, CausalLM]:
    shared = config.model
    assert settings.model is not None
    hub = Hub(shared.download_dir, shared.hf_token)
    try:
        path = resolve_weights(settings.model, settings.revision, shared.load_format, hub)
        impl, quantization = shared.model_impl, settings.quantization
        return path, load_model(path, shared.dtype, device, shared.load_format, {}, impl, quantization)
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"speculative_config: model={settings.model!r}: {error}") from error


def _check_kept(settings: SpeculativeConfig, what: str, spec: KVSpec) -> None:
    """Both models must keep every token in one group of layers, so that a block is the same tokens' in both."""
    if STATE in spec.group_windows:
        raise _refused(
            settings,
            f"{what} has layers that keep a state in the place of keys, which a token that turns out wrong would "
            f"overwrite; {'leave speculative_config out' if what == 'the model' else 'take another one'}",
        )
    if spec.group_windows != (0,):
        raise _refused(
            settings,
            f"{what} has layers with windows, and draft models are served where all layers keep every token; take "
            "method 'ngram' or 'suffix', or a max_model_len within the window",
        )


def _refused(settings: SpeculativeConfig, why: str) -> QuireError:
    return QuireError(f"speculative_config: model={settings.model!r}: {why}.")
