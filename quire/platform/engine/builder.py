"""Putting an engine's parts together: checkpoint, model, tokenizer, pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire import huge_pages, kernels
from quire.checkpoint.files import HUB_TEXTS, Hub, read_json, resolve_checkpoint, resolve_weights
from quire.config import EngineConfig, LoRAConfig, ModelConfig
from quire.errors import AdapterError, CheckpointError, QuireError, UnsupportedModelError
from quire.lora import CONFIG_FILE, WEIGHTS_FILE, AdapterReader, AdapterRegistry, AdapterSlots, DeviceAdapterBudget
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.vision.base import VisionLanguageModel
from quire.multimodal import FeatureCache, ImageProcessor, MediaPreprocessor
from quire.platform.execution.device import choose
from quire.platform.execution.memory import (
    SPLIT_BYTES,
    block_bytes,
    count_blocks,
    count_swap_blocks,
    device_share,
    host_share,
    step_bytes,
)
from quire.platform.execution.model_runner import ModelRunner, allocate_cache
from quire.platform.inputs.processor import ImageInputSpec, Limits
from quire.platform.inputs.tokenizer import eos_token_ids, load_tokenizer
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.prefix_index import PrefixIndex
from quire.platform.kv.swap import SwapSpace

logger = logging.getLogger("quire")

_HUB_SECONDS = 10.0  # for what the hub says of a repository
_MOST_CONFIG = 1 << 20  # bytes of an adapter_config.json


@dataclass(frozen=True)
class Parts:
    """All that an engine is made of, and what was found out on the way."""

    path: Path
    tokenizer: Any
    eos_ids: frozenset[int]
    limits: Limits
    pool: BlockPool
    runner: ModelRunner
    eyes: VisionComponents | None
    adapters: AdapterRegistry | None = None
    residency: DeviceAdapterBudget | None = None
    swap: SwapSpace | None = None


@dataclass(frozen=True)
class VisionComponents:
    """What a model that sees needs beside: of an image, what intake must know; workers; accounts of features."""

    sight: ImageInputSpec
    preparer: MediaPreprocessor
    features: FeatureCache
    feature_bytes: int  # of one placeholder's


def load(config: EngineConfig, ring: Callable[[], object]) -> Parts:
    """Load what `config` names. ring: called by workers whenever one has finished something that a step may wait for.

    Raises UnsupportedModelError, CheckpointError or QuireError."""
    kernels.backend()  # a wrong QUIRE_KERNELS or QUIRE_ISA is an error now, not in the first request
    device = choose(config.model.device)
    if device.type == "cpu":
        return _load(config, ring, device)
    # A model in float32 is to be computed in float32, its tower's convolution too.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with torch.cuda.device(device):
        return _load(config, ring, device)


def _load(config: EngineConfig, ring: Callable[[], object], device: torch.device) -> Parts:
    path = _checkpoint(config.model)
    model = _model(path, config.model, device)
    tokenizer = None
    if not config.model.skip_tokenizer_init:
        tokenizer = load_tokenizer(_tokenizer_path(config.model, path))
    max_model_len = _max_model_len(config.model.max_model_len, model)
    eyes = _eyes(config, path, model, tokenizer, ring) if isinstance(model, VisionLanguageModel) else None
    library = _library(config, model, ring) if config.lora.enabled else None
    bank = AdapterSlots(model, library.weights) if library else None
    pool, swap, runner = _cache(config, model, max_model_len, bank)
    limits = Limits(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        pool_tokens=pool.num_blocks * pool.block_size,
        max_logprobs=config.max_logprobs,
        rope_threshold=model.rope_threshold,
    )
    residency = DeviceAdapterBudget(config.lora, library) if library else None
    eos_ids = eos_token_ids(path, tokenizer, model.vocab_size, config.model.hf_overrides)
    return Parts(path, tokenizer, eos_ids, limits, pool, runner, eyes, library, residency, swap)


def _library(config: EngineConfig, model: CausalLM, ring: Callable[[], object]) -> AdapterRegistry:
    lora = config.lora
    reader = AdapterReader(model, lora.max_lora_rank, min(lora.host_bytes, lora.device_bytes))
    return AdapterRegistry(lora, reader, ring)


def resolve_adapter(path: str, config: LoRAConfig, model: ModelConfig | None = None) -> Path:
    """An adapter's folder: a local one, or the hub's snapshot where `roots` does not forbid it. model: says how files
    come from the hub.

    Raises AdapterError.
    """
    if config.roots is not None or os.path.exists(os.path.expanduser(path)):
        return Path(os.path.expanduser(path))  # which leaves "~nobody" as it is, where Path's would raise
    try:
        return resolve_checkpoint(path, files=(CONFIG_FILE, WEIGHTS_FILE), hub=_hub(model or ModelConfig()))
    except CheckpointError as error:
        raise AdapterError(str(error)) from None


class NotOnHubError(AdapterError):
    """The hub has no such adapter, or cannot be asked."""


def fetch_adapter(name: str, most_bytes: int, model: ModelConfig) -> Path:
    """An adapter of the hub's: the folder of the snapshot that has its two files, and nothing else of it.

    most_bytes: of its weights; they are not fetched where there are more. model: says how files come from the hub.
    With HF_HUB_OFFLINE, from the cache only.
    Raises NotOnHubError, and AdapterError for one that is not to be fetched.
    """
    import huggingface_hub

    try:
        revision = None
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            api = huggingface_hub.HfApi(token=model.hf_token)
            info = api.model_info(name, files_metadata=True, timeout=_HUB_SECONDS)
            _check_sizes(name, {file.rfilename: file.size for file in info.siblings or ()}, most_bytes)
            revision = info.sha  # what was looked at is what is fetched
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[CONFIG_FILE, WEIGHTS_FILE],
            cache_dir=os.path.expanduser(model.download_dir) if model.download_dir else None,
            token=model.hf_token,
        )
    except AdapterError:
        raise
    except Exception as error:  # the hub's, the network's or the disk's
        kind = type(error).__name__
        raise NotOnHubError(f"{name!r}: cannot be had from the Hugging Face hub ({kind}).") from error
    return Path(folder)


def _check_sizes(name: str, sizes: dict[str, int | None], most_bytes: int) -> None:
    for file, most in ((CONFIG_FILE, _MOST_CONFIG), (WEIGHTS_FILE, most_bytes)):
        size = sizes.get(file)
        if size is None:
            raise AdapterError(f"{name!r}: the hub has no {file} of it.")
        if size > most:
            raise AdapterError(f"{name!r}: {file} has {size:,} bytes on the hub, and the limit is {most:,}.")


def _eyes(
    config: EngineConfig, path: Path, model: VisionLanguageModel, tokenizer: Any, ring: Callable[[], object]
) -> VisionComponents:
    media = config.media
    processor = ImageProcessor(path, media, media.processor_settings)
    model.check_processor(processor.known)
    features = FeatureCache(media.feature_bytes)
    width = model.embed(torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)).shape[1]
    preparer = MediaPreprocessor(
        media, processor, model.image_layout, features.__contains__, width, ring, model.planned_layout
    )
    sight = ImageInputSpec(
        marker_id=model.image_token_id,
        marker=None if tokenizer is None else tokenizer.convert_ids_to_tokens(model.image_token_id),
        max_images=media.max_images,
        max_tokens=media.feature_bytes // (width * next(model.parameters()).element_size()),
        settings=processor.settings,
        rotary_positions=model.rotary_positions if model.mrope else None,
    )
    return VisionComponents(sight, preparer, features, width * next(model.parameters()).element_size())


def _hub(config: ModelConfig) -> Hub:
    return Hub(config.download_dir, config.hf_token)


def _checkpoint(config: ModelConfig) -> Path:
    if config.model is None:
        if config.revision is not None:
            raise QuireError(f"revision={config.revision!r}: the bundled model has no revisions; leave it out.")
        from quire.demo import model_path

        return model_path()
    return resolve_weights(config.model, config.revision, config.load_format, _hub(config))


def _model(path: Path, config: ModelConfig, device: torch.device) -> CausalLM:
    try:
        model = load_model(path, config.dtype, device, config.load_format, config.hf_overrides)
    except UnsupportedModelError as error:
        if config.trust_remote_code and "auto_map" in read_json(path / "config.json"):
            raise UnsupportedModelError(
                f"trust_remote_code=True: quire never runs code that comes with a checkpoint. {error}"
            ) from error
        raise
    if config.trust_remote_code:
        logger.warning("trust_remote_code=True: taken; this checkpoint needs no code of its own, and none is run")
    return model


def _tokenizer_path(config: ModelConfig, model_path: Path) -> Path:
    if config.tokenizer is None and config.tokenizer_revision is None:
        return model_path
    source = config.tokenizer or config.model
    if source is None:
        raise QuireError("tokenizer_revision: the bundled model has no revisions; leave it out.")
    return resolve_checkpoint(source, config.tokenizer_revision, HUB_TEXTS, _hub(config))


def _max_model_len(wanted: int | None, model: CausalLM) -> int:
    if wanted is not None and wanted > model.max_model_len:
        raise QuireError(
            f"max_model_len={wanted}: the model has positions for {model.max_model_len} tokens only; lower it."
        )
    return wanted or model.max_model_len


def _pool_share(config: EngineConfig, model: CausalLM, max_model_len: int, available: int) -> int:
    """Bytes that the KV pool takes at most where its size is not given."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        return host_share(config.cache, available)
    if config.cache.num_blocks is not None or config.cache.memory_bytes is not None:
        return 0
    step = step_bytes(model, config, max_model_len)
    others = 2 * step + SPLIT_BYTES  # graphs keep memory of their own, for a smaller step
    others += config.media.feature_bytes if isinstance(model, VisionLanguageModel) else 0
    others += min(config.lora.device_bytes, config.lora.host_bytes) if config.lora.enabled else 0
    total = torch.cuda.mem_get_info(device)[1]
    return device_share(config.cache, total, available, others)


def _cache(
    config: EngineConfig, model: CausalLM, max_model_len: int, bank: AdapterSlots | None
) -> tuple[BlockPool, SwapSpace, ModelRunner]:
    weight = next(model.parameters())
    size = config.cache.block_size
    available = huge_pages.available_bytes(weight.device)
    bytes_a_block = block_bytes(model.kv_spec, size, weight.element_size())
    num_blocks = count_blocks(
        config.cache,
        bytes_a_block,
        config.scheduler.max_num_seqs,
        max_model_len,
        available,
        _pool_share(config, model, max_model_len, available),
    )
    swap = SwapSpace(count_swap_blocks(config.cache, bytes_a_block, weight.device), size)
    swapped = f"; {swap.num_blocks} more in main memory" if swap.num_blocks else ""
    logger.info("KV pool: %d blocks of %d tokens%s", num_blocks, size, swapped)
    index = PrefixIndex() if config.cache.enable_prefix_caching else None
    pool = BlockPool(num_blocks, size, index)
    caches = allocate_cache(model.kv_spec, num_blocks, size, weight.dtype, weight.device)
    if config.debug:
        pool.freed = []
        for cache in caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
    settings = config.model
    return pool, swap, ModelRunner(model, caches, weight.device, settings.enforce_eager, bank, settings.exact_products)
