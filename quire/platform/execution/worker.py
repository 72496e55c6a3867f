"""All that computes: the model, the tensors of the KV pool, and what runs steps on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire import huge_pages, kernels
from quire.checkpoint.files import read_json
from quire.config import EngineConfig
from quire.config.kv_transfer import kv_transfer
from quire.errors import QuireError, UnsupportedModelError
from quire.layers.shards import Shard
from quire.layers.stages import Stage
from quire.lora import AdapterReader, AdapterSlots
from quire.lora.adapter import Adapter
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.models.pooling.base import PoolingModel
from quire.models.pooling.purpose import Purpose
from quire.models.vision.base import MediaModel
from quire.platform.execution import device as devices
from quire.platform.execution import kv_identity
from quire.platform.execution.ahead import PagesAhead
from quire.platform.execution.draft_model import DraftModel, draft_model
from quire.platform.execution.draft_runner import DraftRunner
from quire.platform.execution.executor import WorkerFacts
from quire.platform.execution.given_memory import GivenMemory
from quire.platform.execution.kv_tensors import allocate_cache, keys_of, poison
from quire.platform.execution.kv_transfer import KVTransfer, make
from quire.platform.execution.memory import (
    SPLIT_BYTES,
    block_bytes,
    count_blocks,
    count_states,
    count_swap_blocks,
    device_share,
    host_share,
    state_bytes,
    step_bytes,
    useful_blocks,
)
from quire.platform.execution.model_runner import ModelRunner
from quire.types import KVSpec

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Share:
    """Of a model that several processes compute together. shard: this one's part of every matrix; stage: of the layers;
    None: all. sharers: how many of the processes share the memory of its blocks, itself among them."""

    shard: Shard | None = None
    stage: Stage | None = None
    sharers: int = 1

    @property
    def processes(self) -> int:
        """Of all the model."""
        return (1 if self.shard is None else self.shard.size) * (1 if self.stage is None else self.stage.count)

    @property
    def number(self) -> int:
        """Of this process among them."""
        rank, size = (0, 1) if self.shard is None else (self.shard.rank, self.shard.size)
        return rank if self.stage is None else self.stage.number * size + rank

    def least(self, number: int) -> int:
        """The least of all processes' numbers."""
        number = number if self.shard is None else self.shard.exchange.least(number)
        return number if self.stage is None else self.stage.pipe.least(number)


class Worker:
    """Loads a model and runs its steps.

    reader: of adapters; None where none are served. weights: of the adapter of a uid, for plans that install it.
    share: of the model, that it computes.

    Raises UnsupportedModelError, CheckpointError or QuireError.
    """

    def __init__(self, config: EngineConfig, path: Path, share: Share = Share()) -> None:
        kernels.backend()  # a wrong QUIRE_KERNELS or QUIRE_ISA is an error now, not in the first request
        huge_pages.keep_freed()
        device = devices.choose(config.model.device)
        self.weights: Callable[[int], Adapter] | None = None
        self.reader: AdapterReader | None = None
        if device.type == "cpu":
            self._load(config, path, device, share)
            return
        # A model in float32 is to be computed in float32, its tower's convolution too.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        with torch.cuda.device(device):
            self._load(config, path, device, share)

    def _load(self, config: EngineConfig, path: Path, device: torch.device, share: Share) -> None:
        model = _model(path, config, device, share)
        max_model_len = _max_model_len(config.model.max_model_len, model)
        weight = next(model.parameters())
        embedding_size = model.embed(torch.zeros(1, dtype=torch.int64, device=weight.device)).shape[1]
        feature_size = model.feature_size(embedding_size) if isinstance(model, MediaModel) else embedding_size
        adapter_slots = None
        if config.lora.enabled:
            most = min(config.lora.host_bytes, config.lora.device_bytes)
            self.reader = AdapterReader(model, config.lora.max_lora_rank, most)
            adapter_slots = AdapterSlots(model, self._adapter)
        spec = replace(model.kv_spec.within(max_model_len), int8=_keeps_int8(config, device), own=model.own_layers)
        windows, size, settings = spec.group_windows, config.cache.block_size, config.model
        drafts = draft_model(config, model, spec, max_model_len, weight.device)
        more = block_bytes(drafts.spec, size, drafts.model.dtype.itemsize) if drafts is not None else 0
        counts = _count_blocks(config, model, spec, max_model_len, share, more)
        num_blocks, num_swap_blocks, num_states, pool_bytes = counts
        # What GPUs exchange has not been tried in a CUDA graph.
        eager = settings.enforce_eager or (device.type == "cuda" and share.processes > 1)
        caches = allocate_cache(spec, num_blocks, size, model.dtype, weight.device, num_states)
        draft = None if drafts is None else _draft_runner(drafts, num_blocks, size, weight.device, eager)
        pool = [*caches, *(draft.caches if draft is not None else ())]
        if config.debug:
            poison(pool)
        self.ahead = PagesAhead(keys_of(pool), num_states) if device.type == "cpu" and not config.debug else None
        self.runner = ModelRunner(
            model,
            caches,
            weight.device,
            eager,
            adapter_slots,
            settings.exact_products,
            windows,
            self.ahead,
            draft,
            share.stage,
        )
        self.runner.transfers = _transfers(config, path, self.runner, spec, max_model_len, share)
        models = [(model, path), *([(drafts.model, drafts.path)] if drafts is not None else [])]
        self.memory = GivenMemory(models, self.runner, settings.load_format)
        self.model = model
        self.facts = WorkerFacts(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            rope_threshold=model.rope_threshold,
            crosses_threshold=model.crosses_threshold,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            num_states=num_states,
            pool_bytes=pool_bytes,
            windows=windows,
            dtype=model.dtype,
            device=str(weight.device),
            kernels=kernels.backend_of(weight).__name__.rpartition(".")[2],
            embedding_size=embedding_size,
            feature_bytes=feature_size * model.dtype.itemsize,
            sees=isinstance(model, MediaModel),
            pooling=model.pooling if isinstance(model, PoolingModel) else None,
        )

    def use_device(self) -> None:
        """Let the calling thread's current GPU be the model's."""
        if self.runner.device.type == "cuda":
            torch.cuda.set_device(self.runner.device)

    def settle(self) -> None:
        """Wait until the GPU has done all of a step that has failed. It never has where another process has failed
        before it would exchange what this one waits for: nobody must hear of the failure then."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def close(self) -> None:
        """No step will come."""
        if self.ahead is not None:
            self.ahead.close()
        if self.runner.transfers is not None:
            self.runner.transfers.close()

    def _adapter(self, uid: int) -> Adapter:
        assert self.weights is not None
        return self.weights(uid)


def _draft_runner(drafts: DraftModel, num_blocks: int, size: int, device: torch.device, eager: bool) -> DraftRunner:
    own = allocate_cache(drafts.spec, num_blocks, size, drafts.model.dtype, device)
    return DraftRunner(drafts.model, own, eager)


def _transfers(
    config: EngineConfig,
    path: Path,
    runner: ModelRunner,
    spec: KVSpec,
    max_model_len: int,
    share: Share,
) -> KVTransfer | None:
    """What moves blocks from and to beside the pool; None: they are kept nowhere. Raises QuireError for those that
    cannot be."""
    if config.cache.kv_transfer_config is None:
        return None
    if spec.state is not None:
        raise QuireError(
            "kv_transfer_config: this model has layers that keep a state in the place of keys, which is overwritten "
            "and not kept beside the pool; leave it out."
        )
    if runner.drafts:
        raise QuireError(
            "kv_transfer_config: the blocks of a draft model (speculative_config) are not kept beside the pool; leave "
            "one of the two out, or draft by method 'ngram' or 'suffix'."
        )
    identity = kv_identity.identity(config, path, runner.model, spec, max_model_len)
    identity = kv_identity.of_all(identity, share.shard, share.stage)
    settings = kv_transfer(config.cache.kv_transfer_config)
    return make(settings, runner.blocks, identity, share.number, share.processes)


def _model(path: Path, engine: EngineConfig, device: torch.device, share: Share) -> CausalLM:
    config = engine.model
    try:
        model = load_model(
            path,
            config.dtype,
            device,
            config.load_format,
            config.hf_overrides,
            config.model_impl,
            config.quantization,
            purpose_of(engine),
            share.shard,
            share.stage,
        )
    except UnsupportedModelError as error:
        if config.trust_remote_code and "auto_map" in read_json(path / "config.json"):
            raise UnsupportedModelError(
                f"trust_remote_code=True: quire never runs code that comes with a checkpoint. {error}"
            ) from error
        raise
    if config.trust_remote_code:
        logger.warning("trust_remote_code=True: taken; this checkpoint needs no code of its own, and none is run")
    return model


def purpose_of(config: EngineConfig) -> Purpose:
    """What the settings say that a model is for."""
    model = config.model
    return Purpose(model.runner, model.conversion, model.pooler_config, config.lora.enabled)


def _keeps_int8(config: EngineConfig, device: torch.device) -> bool:
    if config.cache.kv_cache_dtype != "int8":
        return False
    if device.type != "cpu":
        raise QuireError(
            f"kv_cache_dtype='int8': keys and values are kept so on CPUs alone, and this model is on {device}; take "
            "kv_cache_dtype='auto', or device='cpu'."
        )
    return True


def _max_model_len(wanted: int | None, model: CausalLM) -> int:
    most = model.pooling.max_tokens if isinstance(model, PoolingModel) else None
    if wanted is None and most is not None:
        return min(most, model.max_model_len)
    if wanted is not None and wanted > model.max_model_len:
        raise QuireError(
            f"max_model_len={wanted}: the model has positions for {model.max_model_len} tokens only; lower it."
        )
    return wanted or model.max_model_len


def _pool_share(config: EngineConfig, model: CausalLM, max_model_len: int, available: int, share: Share) -> int:
    """Bytes that the KV pool takes at most where its size is not given. available: of the share's memory."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        return host_share(config.cache, available)
    if config.cache.num_blocks is not None or config.cache.memory_bytes is not None:
        return 0
    step = step_bytes(model, config, max_model_len, share.stage)
    others = 2 * step + SPLIT_BYTES  # graphs keep memory of their own, for a smaller step
    others += config.media.feature_bytes if config.media.prompt_embeds or isinstance(model, MediaModel) else 0
    others += min(config.lora.device_bytes, config.lora.host_bytes) if config.lora.enabled else 0
    total = torch.cuda.mem_get_info(device)[1] // share.sharers
    return device_share(config.cache, total, available, others)


def _count_blocks(
    config: EngineConfig,
    model: CausalLM,
    spec: KVSpec,
    max_model_len: int,
    share: Share,
    more: int = 0,
) -> tuple[int, int, int, int]:
    """(blocks of the pool, blocks in main memory, states of the pool, bytes of the pool). share: all processes of the
    model have as many blocks. more: bytes that a block takes beside those of the model's layers."""
    weight = next(model.parameters())
    size = config.cache.block_size
    if weight.is_cuda:
        share.least(0)  # all have loaded their weights, and NCCL has its memory
    available = share.least(huge_pages.available_bytes(weight.device) // share.sharers)
    bytes_ = config.cache.memory_bytes
    if bytes_ is not None:
        config = replace(config, cache=replace(config.cache, memory_bytes=bytes_ // share.processes))
    bytes_a_block = block_bytes(spec, size, model.dtype.itemsize) + more
    bytes_a_state = state_bytes(spec, model.dtype.itemsize)
    most = _pool_share(config, model, max_model_len, available, share)
    num_states = count_states(config.cache, spec, bytes_a_state, config.scheduler.max_num_seqs, most)
    taken = num_states * bytes_a_state
    num_blocks = count_blocks(
        config.cache,
        bytes_a_block,
        useful_blocks(spec, size, config.scheduler, max_model_len),
        available - taken,
        most - taken,
        len(spec.groups),
        taken,
    )
    num_blocks = share.least(num_blocks)  # heads and layers are not all of one number
    # A sequence with states is computed anew, from the last state that the prefix cache has of it.
    num_swap_blocks = 0 if spec.state else count_swap_blocks(config.cache, bytes_a_block, weight.device)
    num_swap_blocks = share.least(num_swap_blocks // share.processes)
    swapped = f"; {num_swap_blocks} more in main memory" if num_swap_blocks else ""
    groups = f", each for one of {len(spec.groups)} groups of layers" if len(spec.groups) > 1 else ""
    states = f"; {num_states} states" if num_states else ""
    kept = " in int8" if spec.int8 else ""
    logger.info("KV pool: %d blocks of %d tokens%s%s%s%s", num_blocks, size, kept, groups, swapped, states)
    return num_blocks, num_swap_blocks, num_states, num_blocks * bytes_a_block + taken
