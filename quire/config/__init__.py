"""Every setting of the engine: frozen, checked when made, and the only place that holds a default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import QuireError

_LOAD_FORMATS = ("auto", "safetensors", "pt")


@dataclass(frozen=True)
class ModelConfig:
    """What to load and how.

    model: a local directory or a hub id; None takes the bundled model.
    dtype: "auto" (the checkpoint's own), "bfloat16", "float16" or "float32".
    load_format: "safetensors"; "pt", torch's pytorch_model.bin, read in a process of its own; or "auto", the first of
        these that is there.
    device: "auto" (a GPU where there is one that the kernels were built for, else the CPU), "cpu", "cuda" or
        "cuda:1".
    exact_products: on a GPU, multiply by kernels whose sums do not depend on how many tokens share a step; else by
        cuBLAS, which is faster for many tokens, and a request's last bits then depend on its company. A CPU is always
        exact.
    max_model_len: most tokens of prompt and output together; None takes the model's own limit.
    enforce_eager: run every step through the model's Python; never replay a recorded one.
    trust_remote_code: taken, and nothing of it done: no code that comes with a checkpoint is ever run.
    download_dir: where the hub's files are kept; None: where huggingface_hub keeps them.
    hf_token: for the hub; True takes the one that is stored, False none; None: as huggingface_hub finds one.
    hf_overrides: fields of config.json that are to have other values; of an object in it, those of its fields.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    exact_products: bool = True
    max_model_len: int | None = None
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    trust_remote_code: bool = False
    download_dir: str | None = None
    hf_token: bool | str | None = field(default=None, repr=False)
    hf_overrides: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.load_format not in _LOAD_FORMATS:
            raise QuireError(f"load_format={self.load_format!r}: is one of {', '.join(_LOAD_FORMATS)}.")
        _of_type(bool, trust_remote_code=self.trust_remote_code)
        _of_type(str, download_dir=self.download_dir)
        if not isinstance(self.hf_token, (bool, str, type(None))):
            raise QuireError("hf_token: must be a text, or True for the one that is stored.")  # which is not shown
        if not isinstance(self.hf_overrides, Mapping):
            raise QuireError("hf_overrides: must be a dict of fields of config.json; no code is taken.")
        _at_least(1, max_model_len=self.max_model_len)
        _of_type(str, model=self.model, tokenizer=self.tokenizer, dtype=self.dtype, device=self.device)
        _of_type(bool, exact_products=self.exact_products)
        _of_type(str, revision=self.revision, tokenizer_revision=self.tokenizer_revision)
        _of_type(bool, skip_tokenizer_init=self.skip_tokenizer_init, enforce_eager=self.enforce_eager)


@dataclass(frozen=True)
class CacheConfig:
    """The KV block pool.

    block_size: tokens a block. Small blocks waste little (half a block a sequence); 8 costs the kernels nothing.
    num_blocks: blocks in the pool; None sizes the pool by `memory_bytes`.
    memory_bytes: the pool's size; None takes what `max_num_seqs` sequences of the model's full length need, within
        what `memory_fraction` allows.
    memory_fraction: on a CPU, of the memory that is available once the weights are loaded: what the pool may take (0.5
        by default). On a GPU, of all its memory: what weights, pool, adapters and a step's intermediate results may
        take together (0.9); a step of full size is run to see what it takes.
    swap_bytes: main memory for the blocks of preempted sequences; 0 computes them anew. GPUs alone swap.
    """

    block_size: int = 8
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_fraction: float | None = None
    swap_bytes: int = 4 << 30
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least(1, block_size=self.block_size, num_blocks=self.num_blocks, memory_bytes=self.memory_bytes)
        _of_type(bool, enable_prefix_caching=self.enable_prefix_caching)
        _at_least(0, swap_bytes=self.swap_bytes)
        fraction = self.memory_fraction
        if fraction is not None and (not isinstance(fraction, (int, float)) or not 0 < fraction <= 1):
            raise QuireError(f"memory_fraction={self.memory_fraction!r}: must be above 0 and at most 1.")


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold: at most this many sequences, and this many tokens over all of them."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        _at_least(1, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)


@dataclass(frozen=True)
class MediaConfig:
    """Images in prompts.

    max_image_bytes, max_image_pixels: of one image, as it comes and as it is decoded.
    max_image_seconds: CPU time that decoding one image may take.
    allowed_local_media_path: the folder that file: URLs may read; None refuses them.
    allowed_media_domains: hosts that http: and https: URLs may name, "host" or "host:port"; none refuses all.
    media_fetch_timeout: seconds for one URL, its redirects included.
    max_images: of one prompt.
    processor_settings: for the checkpoint's image processor, on top of its own (`mm_processor_kwargs`).
    cache_bytes: for processed pixels that wait to be encoded (a quarter) and the features of encoded images.
    workers: threads that prepare images; None takes as many as there are cores, at most 4.
    """

    max_image_bytes: int = 20_000_000
    max_image_pixels: int = 50_000_000
    max_image_seconds: float = 10.0
    allowed_local_media_path: str | None = None
    allowed_media_domains: tuple[str, ...] = ()
    media_fetch_timeout: float = 10.0
    max_images: int = 64
    processor_settings: Mapping[str, object] = field(default_factory=dict)
    cache_bytes: int = 512 << 20
    workers: int | None = None

    def __post_init__(self) -> None:
        _at_least(1, max_image_bytes=self.max_image_bytes, max_image_pixels=self.max_image_pixels)
        if not isinstance(self.max_image_seconds, (int, float)) or not 0 < self.max_image_seconds <= 3600:
            raise QuireError(f"max_image_seconds={self.max_image_seconds!r}: must be above 0 and at most 3600.")
        _of_type(str, allowed_local_media_path=self.allowed_local_media_path)
        _of_type(tuple, allowed_media_domains=self.allowed_media_domains)
        if not isinstance(self.media_fetch_timeout, (int, float)) or not 0 < self.media_fetch_timeout <= 3600:
            raise QuireError(f"media_fetch_timeout={self.media_fetch_timeout!r}: must be above 0 and at most 3600 s.")
        _at_least(0, max_images=self.max_images)
        _at_least(1, cache_bytes=self.cache_bytes, workers=self.workers)
        _of_type(Mapping, processor_settings=self.processor_settings)

    @property
    def pixel_bytes(self) -> int:
        """The share of pixels that wait."""
        return self.cache_bytes // 4

    @property
    def feature_bytes(self) -> int:
        """The share of features."""
        return self.cache_bytes - self.pixel_bytes


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA adapters.

    host_bytes, device_bytes: what adapters may take in main memory, and those of them that steps can use. (On a CPU the
        second are the first's, not a copy.)
    max_loras, max_cpu_loras: how many adapters may be there, besides; None sets no limit.
    max_lora_rank: a larger rank is refused; None takes any.
    roots: the folders that adapters may be read from, links resolved; None allows all.
    workers: adapters that are read at once; each takes a few times its file's size meanwhile, beside the budget.
    """

    enabled: bool = False
    host_bytes: int = 4 << 30
    device_bytes: int = 2 << 30
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    roots: tuple[str, ...] | None = None
    workers: int = 2

    def __post_init__(self) -> None:
        _of_type(bool, enabled=self.enabled)
        _at_least(1, host_bytes=self.host_bytes, device_bytes=self.device_bytes, workers=self.workers)
        _at_least(1, max_loras=self.max_loras, max_cpu_loras=self.max_cpu_loras, max_lora_rank=self.max_lora_rank)
        _of_type(tuple, roots=self.roots)


@dataclass(frozen=True)
class EngineConfig:
    """All of it.

    seed: makes the draws of requests that bring no seed repeatable; None takes the system's entropy.
    max_logprobs: the most `logprobs` or `prompt_logprobs` that a request may ask for; -1 lifts the limit.
    debug: check every table after each step and poison freed blocks with NaN. Slow; for tests and bug hunts.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    seed: int | None = None
    max_logprobs: int = 20
    debug: bool = False

    def __post_init__(self) -> None:
        _at_least(-1, max_logprobs=self.max_logprobs)
        _of_type(int, seed=self.seed)
        _of_type(bool, debug=self.debug)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server.

    host, port, uds: where it listens; uds, the path of a Unix socket, instead of the two others.
    api_keys: one of them opens every route but /health, /ready and /ping; none: all are open.
    admin_api_key: what changes adapters or memory needs this one; it opens the other routes too.
    served_model_names: what clients may call the base model; none: as it was named, or "quire-demo".
    chat_template: Jinja, used instead of the tokenizer's.
    default_sampling: SamplingParams that hold where a request says nothing.
    allow_runtime_lora: adapters may be loaded and unloaded over HTTP, from under `lora_roots` alone.
    enable_admin_routes: the engine may be put to sleep, woken up and its prefix cache be reset over HTTP.
    lora_hub: of whom the hub's adapters may be taken: "owner", "owner/name", or "*" for all.
    lora_resolver: with allow_runtime_lora, an adapter that a request names is loaded when it is first named.
    max_queue: sequences that may wait for those that run; more are answered with 429.
    max_request_bytes: of a body. max_prompts, max_n: of one request.
    max_connections: that may be open at once; as many as the limit of open files allows, where that is less.
    header_timeout, body_timeout: seconds in which a client must have sent its header, and then its body.
    timeout_keep_alive: seconds that a connection stays open between two requests.
    send_timeout: seconds in which a client that is behind must take 32 KiB of its answer.
    unload_timeout: seconds that an unloading, and going to sleep, wait for running requests.
    shutdown_timeout: seconds that running requests get to finish when the server is told to stop.
    step_timeout: seconds after which a step counts as stuck, and /health says so.
    allowed_origins: whose pages may call from a browser (CORS); none by default.
    unknown_fields: "refuse" a request's field that is not known or not served, or "warn": pass over it, and say so.
    metrics_prefix: metrics have twins of vLLM's names after this ("vllm:"); none by default.
    log_probes: /health, /ready, /ping and /metrics have lines in the log even when all is well.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    response_role: str = "assistant"
    default_sampling: Mapping[str, object] = field(default_factory=dict)
    allow_runtime_lora: bool = False
    enable_admin_routes: bool = False
    lora_roots: tuple[str, ...] = ()
    lora_hub: tuple[str, ...] = ()
    lora_resolver: bool = True
    max_queue: int = 1024
    max_request_bytes: int = 32 << 20
    max_prompts: int = 256
    max_n: int = 128
    max_connections: int = 2048
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    timeout_keep_alive: float = 30.0
    send_timeout: float = 60.0
    unload_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    step_timeout: float = 300.0
    allowed_origins: tuple[str, ...] = ()
    unknown_fields: str = "refuse"
    metrics_prefix: str = ""
    log_probes: bool = False

    def __post_init__(self) -> None:
        _at_least(0, port=self.port, max_queue=self.max_queue)
        if self.port > 65535:
            raise QuireError(f"port={self.port}: must be at most 65535.")
        _at_least(1, max_request_bytes=self.max_request_bytes, max_prompts=self.max_prompts, max_n=self.max_n)
        _at_least(1, max_connections=self.max_connections)
        _of_type(str, metrics_prefix=self.metrics_prefix)
        _of_type(str, host=self.host, uds=self.uds, chat_template=self.chat_template, root_path=self.root_path)
        _of_type(bool, allow_runtime_lora=self.allow_runtime_lora, enable_admin_routes=self.enable_admin_routes)
        _of_type(bool, lora_resolver=self.lora_resolver, log_probes=self.log_probes)
        for name in (
            "header_timeout", "body_timeout", "timeout_keep_alive", "send_timeout", "unload_timeout",
            "shutdown_timeout", "step_timeout",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 86_400:
                raise QuireError(f"{name}={value!r}: must be seconds, from 0 to 86400.")
        for key in (*self.api_keys, *([] if self.admin_api_key is None else [self.admin_api_key])):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise QuireError("api_key, admin_api_key: a key is printable ASCII without spaces, and not empty.")
        if not re.fullmatch(r"(?!quire_)([a-zA-Z_:][a-zA-Z0-9_:]*)?", self.metrics_prefix):
            raise QuireError(
                f"metrics_prefix={self.metrics_prefix!r}: is of letters, digits, _ and :, as vllm:, and not quire_."
            )
        if self.unknown_fields not in ("refuse", "warn"):
            raise QuireError(f"unknown_fields={self.unknown_fields!r}: is refuse or warn.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise QuireError("ssl_keyfile and ssl_certfile belong together: give both.")


def _at_least(limit: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < limit):
            raise QuireError(f"{name}={value!r}: must be an integer of at least {limit}.")


def _of_type(kind: type, **values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            raise QuireError(f"{name}={value!r}: must be of type {kind.__name__}.")
