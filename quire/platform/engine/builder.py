"""Putting an engine's parts together: checkpoint, model, tokenizer, pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.files import HUB_TEXTS, Hub, read_json, resolve_checkpoint, resolve_weights
from quire.config import EngineConfig, LoRAConfig, MediaConfig, ModelConfig
from quire.config.kv_transfer import CONSUMER, kv_transfer
from quire.errors import AdapterError, CheckpointError, QuireError
from quire.garbage import collector_waits
from quire.lora import CONFIG_FILE, WEIGHTS_FILE, AdapterRegistry, DeviceAdapterBudget
from quire.models.vision.base import MediaModel
from quire.multimodal import (
    RANGE_ROWS,
    AudioHandler,
    AudioProcessor,
    Configurable,
    FeatureCache,
    ImageProcessor,
    MediaHandler,
    MediaPreprocessor,
    MediaSettings,
    RowsSpec,
    VideoHandler,
    VideoProcessor,
)
from quire.platform.engine.executors import executor_for
from quire.platform.execution.executor import Executor, WorkerFacts
from quire.platform.execution.in_process import InProcessExecutor
from quire.platform.inputs.image_spec import ImageInputSpec
from quire.platform.inputs.limits import Limits
from quire.platform.inputs.markers import AroundIds
from quire.platform.inputs.numbered import NumberedMarkers
from quire.platform.inputs.tokenizer import eos_token_ids, learn_words, load_tokenizer, processor_settings
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.prefix_index import PrefixIndex
from quire.platform.kv.swap import SwapSpace
from quire.platform.kv.transfers import TransferAccount
from quire.platform.kv.windows import Footprint
from quire.types import MediaKind

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
    executor: Executor
    vision: VisionComponents | None
    rows_spec: RowsSpec | None = None  # of prompts that come as embeddings, where they are served
    adapters: AdapterRegistry | None = None
    adapter_budget: DeviceAdapterBudget | None = None
    swap: SwapSpace | None = None
    transfers: TransferAccount | None = None  # of blocks beside the pool
    windows: tuple[int, ...] = (0,)  # of the groups of layers that the pool serves


@dataclass(frozen=True)
class VisionComponents:
    """What a model that sees needs: what the input processor must know of images, workers, the account of features."""

    image_spec: ImageInputSpec
    preprocessor: MediaPreprocessor
    features: FeatureCache
    feature_bytes: int  # of one placeholder's


@collector_waits()
def load(config: EngineConfig, notify: Callable[[], object]) -> Parts:
    """Load what `config` names. notify: called by workers whenever one has finished something that a step may wait for.

    Raises UnsupportedModelError, CheckpointError or QuireError."""
    path = _checkpoint(config.model)
    executor = executor_for(config, path)
    facts = executor.facts
    try:
        tokenizer = None
        if not config.model.skip_tokenizer_init:
            tokenizer = load_tokenizer(_tokenizer_path(config.model, path))
        vision = _vision_components(config, path, executor, tokenizer, notify) if facts.sees else None
        rows_spec = _rows_spec(config.media, facts) if config.media.prompt_embeds else None
        _check_pooling(config, facts)
        limits = Limits(
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            pool_tokens=Footprint(facts.num_blocks, config.cache.block_size, facts.windows).longest(
                facts.max_model_len
            ),
            max_logprobs=config.max_logprobs,
            rope_threshold=facts.rope_threshold,
            crosses_threshold=facts.crosses_threshold,
        )
        eos_ids = eos_token_ids(path, tokenizer, facts.vocab_size, config.model.hf_overrides)
    except BaseException:
        executor.close()
        raise
    registry = AdapterRegistry(config.lora, executor.adapter_reader(), notify) if config.lora.enabled else None
    if registry is not None:
        executor.connect_adapters(registry.weights)
    adapter_budget = DeviceAdapterBudget(config.lora, registry) if registry else None
    size = config.cache.block_size
    reads_both_ways = facts.pooling is not None and facts.pooling.bidirectional  # keys depend on what follows
    index = PrefixIndex() if config.cache.enable_prefix_caching and not reads_both_ways else None
    pool = BlockPool(facts.num_blocks, size, index, facts.num_states)
    if config.debug:
        pool.freed = []
    swap = SwapSpace(facts.num_swap_blocks, size, facts.windows)
    return Parts(
        path,
        tokenizer,
        eos_ids,
        limits,
        pool,
        executor,
        vision,
        rows_spec,
        registry,
        adapter_budget,
        swap,
        _transfers(config, executor, index is not None, notify),
        facts.windows,
    )


def _transfers(
    config: EngineConfig, executor: Executor, caches: bool, notify: Callable[[], object]
) -> TransferAccount | None:
    """The account of blocks beside the pool, with those that are there; None: there are to be none."""
    if config.cache.kv_transfer_config is None:
        return None
    if not caches:
        executor.close()
        why = (
            "this model's tokens see later ones"
            if config.cache.enable_prefix_caching
            else "enable_prefix_caching=False"
        )
        raise QuireError(f"kv_transfer_config: needs the prefix cache, whose keys it is found by: {why}; leave it out.")
    settings, facts = kv_transfer(config.cache.kv_transfer_config), executor.facts
    bytes_a_block = facts.pool_bytes // facts.num_blocks // config.tensor_parallel_size // config.pipeline_parallel_size
    account = TransferAccount(
        max(1, -(-settings.min_tokens // config.cache.block_size)),
        max(1, settings.max_loading_bytes // bytes_a_block),
        settings.role != CONSUMER,
    )
    account.reported(executor.take_transfers())
    if isinstance(executor, InProcessExecutor):  # a worker in another process tells nobody
        executor.connect_transfers(notify)
    return account


def _check_pooling(config: EngineConfig, facts: WorkerFacts) -> None:
    """Raise QuireError for settings that a model which generates nothing has no use for."""
    if facts.pooling is None:
        return
    if config.scheduler.speculative_config is not None:
        raise QuireError("speculative_config: this model generates nothing (runner='pooling'), so nothing is drafted.")
    towers = facts.pooling.towers
    if towers is not None and config.media.prompt_embeds:
        raise QuireError("enable_prompt_embeds: this model makes vectors of texts and of images alone.")
    if towers is not None and towers.length > facts.max_model_len:
        raise QuireError(
            f"max_model_len={facts.max_model_len}: each text of this model is padded to {towers.length} tokens; leave "
            "it out."
        )
    if config.media.prompt_embeds and facts.pooling.bidirectional:
        raise QuireError("enable_prompt_embeds: all tokens of this model's prompts see one another; give texts or ids.")


def _rows_spec(config: MediaConfig, facts: WorkerFacts) -> RowsSpec:
    """What prompts as embeddings must be. Raises QuireError where their rows have no room."""
    if RANGE_ROWS * facts.feature_bytes > config.feature_bytes:
        raise QuireError(
            f"media_cache_bytes={config.cache_bytes:,}: is too little for enable_prompt_embeds: {RANGE_ROWS} rows, "
            f"each of {facts.feature_bytes:,} bytes, must fit three quarters of it."
        )
    return RowsSpec(facts.embedding_size, facts.dtype, facts.max_model_len)


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


def _vision_components(
    config: EngineConfig, path: Path, executor: Executor, tokenizer: Any, notify: Callable[[], object]
) -> VisionComponents:
    media, facts, model = config.media, executor.facts, executor.structure()
    assert isinstance(model, MediaModel)
    texts = _Texts(config, path, tokenizer, tuple(model.marker_words.values()))
    model.read_processor(processor_settings(path), texts.encode)
    processor = None
    if "image" in model.media_token_ids:
        processor = ImageProcessor(path, media, None, model.processor_settings)
        model.check_processor(processor.known)
    others, handlers = _other_processors(config, path, model)
    processors: dict[MediaKind, Configurable] = {} if processor is None else {"image": processor}
    settings = MediaSettings({**processors, **others})
    settings.keep(media.processor_settings)
    features = FeatureCache(media.feature_bytes)
    preprocessor = MediaPreprocessor(
        media, processor, model.image_layout, features.__contains__, model.feature_size(facts.embedding_size), notify,
        model.planned_layout, model.given_layout, handlers,
    )  # fmt: skip
    taken = {*processors, *others}
    markers = {kind: token for kind, token in model.media_marker_ids.items() if kind in taken}
    words: dict[MediaKind, str] = {}
    if tokenizer is not None:
        found = {kind: tokenizer.convert_ids_to_tokens(token) for kind, token in markers.items()}
        words = {kind: str(word) for kind, word in found.items() if word is not None}
    image_spec = ImageInputSpec(
        marker_id=markers.get("image"),
        marker=words.pop("image", None),
        limits=media.limits,
        max_tokens=media.feature_bytes // facts.feature_bytes,
        settings=settings,
        rotary_positions=model.rotary_positions if model.mrope else None,
        markers=markers,
        max_seen=_most_seen(config, facts, model),
        prompt_sees=model.prompt_sees,
        placeholders=frozenset(model.media_token_ids.values()),
        lay_out=model.lay_out,
        lays_out_special=model.lays_out_special,
        bos=str(getattr(tokenizer, "bos_token", None) or ""),
        numbered=NumberedMarkers(model.numbered_marker, markers["image"]) if model.numbered_marker else None,
        words=words,
        completed=_completed(model, markers, texts),
    )
    return VisionComponents(image_spec, preprocessor, features, facts.feature_bytes)


def _other_processors(
    config: EngineConfig, path: Path, model: MediaModel
) -> tuple[dict[MediaKind, Configurable], dict[MediaKind, MediaHandler]]:
    """Those of the kinds beside images that the model takes, and what prepares media with them.

    Videos are left out where the checkpoint brings no processor for them, and the log says why. Raises CheckpointError
    where a model that hears has none for sounds.
    """
    processors: dict[MediaKind, Configurable] = {}
    handlers: dict[MediaKind, MediaHandler] = {}
    if "video" in model.media_marker_ids:
        try:
            video = VideoProcessor(path, config.media, str(read_json(path / "config.json").get("model_type")))
            processors["video"] = video
            handlers["video"] = VideoHandler(config.media, video, model.video_layout)
        except CheckpointError as error:
            logger.warning("no videos are taken: %s", error)
    if "audio" in model.media_token_ids:
        audio = AudioProcessor(path)
        model.check_audio_processor(audio.known)
        processors["audio"] = audio
        handlers["audio"] = AudioHandler(config.media, audio, model.audio_layout)
    return processors, handlers


def _most_seen(config: EngineConfig, facts: WorkerFacts, model: MediaModel) -> int:
    """How many tokens that see one another a step can compute, in all layers: whole prompts pay no heed to windows."""
    chunk = Footprint(facts.num_blocks, config.cache.block_size, facts.windows).most_at_once
    windows = [window for window in model.kv_spec.within(facts.max_model_len).windows if window]
    return min(config.scheduler.max_num_batched_tokens, chunk, *(() if model.prompt_sees else windows))


def _completed(model: MediaModel, markers: Mapping[MediaKind, int], texts: _Texts) -> Callable[[list[int]], list[int]]:
    if "video" not in markers or not any(model.around_video_marker):
        return list
    return AroundIds(markers["video"], *model.around_video_marker, texts.encode, texts.decode).complete


class _Texts:
    """Texts to token ids and back, by the engine's tokenizer; where it has none, by the checkpoint's, loaded then.

    words: each of which is one token, whether the tokenizer brings it or not.
    """

    def __init__(self, config: EngineConfig, path: Path, tokenizer: Any, words: tuple[str, ...]) -> None:
        self._source, self._words, self._own = _tokenizer_path(config.model, path), words, tokenizer
        if tokenizer is not None:
            learn_words(tokenizer, words)

    @property
    def _tokenizer(self) -> Any:
        if self._own is None:
            self._own = load_tokenizer(self._source)
            learn_words(self._own, self._words)
        return self._own

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _hub(config: ModelConfig) -> Hub:
    return Hub(config.download_dir, config.hf_token)


def _checkpoint(config: ModelConfig) -> Path:
    if config.model is None:
        if config.revision is not None:
            raise QuireError(f"revision={config.revision!r}: the bundled model has no revisions; leave it out.")
        from quire.demo import model_path

        return model_path()
    return resolve_weights(config.model, config.revision, config.load_format, _hub(config))


def _tokenizer_path(config: ModelConfig, model_path: Path) -> Path:
    if config.tokenizer is None and config.tokenizer_revision is None:
        return model_path
    source = config.tokenizer or config.model
    if source is None:
        raise QuireError("tokenizer_revision: the bundled model has no revisions; leave it out.")
    return resolve_checkpoint(source, config.tokenizer_revision, HUB_TEXTS, _hub(config))
