"""Every option of `quire serve`, in one table.

An option's flag, its QUIRE_* variable and its name in a file follow from its name, and its default from `quire.config`.
To add one: a `Setting` in its group, and the field of `ServerConfig`, or the argument of `LLM`, that it sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from quire.config import ServerConfig
from quire.config.arguments import default_of


class Kind(Enum):
    """What a setting's value is."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"
    SIZE = "whole number, also as 4k, 2M or 1G"  # k is 1000, K is 1024
    SWITCH = "on or off"
    TEXTS = "several texts"
    OBJECT = "JSON object"
    LIMITS = "JSON object, or name=number"


class Target(Enum):
    """Whose argument or field a setting is."""

    ENGINE = "an argument of LLM"
    SERVER = "a field of ServerConfig"
    TASK = "a field of serve.Task"


@dataclass(frozen=True)
class Setting:
    """One option.

    field: its name at the target, if that is another. metavar: what help shows for its value. shown: the default, where
    the configuration does not say it. choices: the only values. flags, variables: more of them, as vLLM has them.
    """

    name: str
    kind: Kind
    help: str
    target: Target = Target.ENGINE
    field: str | None = None
    metavar: str | None = None
    shown: str | None = None
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"QUIRE_{self.name.upper()}"

    @property
    def destination(self) -> str:
        return self.field or self.name

    @property
    def default(self) -> str | None:
        """What help says that it is when it is not given."""
        if self.shown is not None or self.target is Target.TASK or self.kind is Kind.SWITCH:
            return self.shown
        if self.target is Target.ENGINE:
            value = default_of(self.name)
        else:
            value = {field.name: field.default for field in dataclasses.fields(ServerConfig)}[self.destination]
        if value is None or value == "" or not isinstance(value, (int, float, str)):
            return None
        if self.name.endswith("_bytes") and isinstance(value, int) and value % (1 << 20) == 0:
            return f"{value >> 20} MiB"
        return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Group:
    """Settings that help shows together."""

    title: str
    settings: tuple[Setting, ...]


_TEXT, _WHOLE, _NUMBER, _SIZE, _SWITCH, _TEXTS, _OBJECT, _LIMITS = Kind
_SERVER, _TASK = Target.SERVER, Target.TASK

_MODEL = (
    Setting("model", _TEXT, "The same as MODEL."),
    Setting("tokenizer", _TEXT, "Where the tokenizer is, if not with the model."),
    Setting("revision", _TEXT, "The hub's branch, tag or commit."),
    Setting("tokenizer_revision", _TEXT, "The same, of the tokenizer."),
    Setting("dtype", _TEXT, "auto (the checkpoint's), bfloat16, float16 or float32."),
    Setting(
        "load_format", _TEXT, "safetensors; pt, torch's .bin files; or the first of these that is there.",
        choices=("auto", "safetensors", "pt"),
    ),
    Setting("device", _TEXT, "auto, cpu, cuda or cuda:1."),
    Setting("exact_products", _SWITCH, "On a GPU: bits that do not depend on the batch (the default), or cuBLAS."),
    Setting("max_model_len", _SIZE, "Most tokens of prompt and answer.", shown="the model's"),
    Setting("enforce_eager", _SWITCH, "Never replay recorded steps."),
    Setting("download_dir", _TEXT, "Where the hub's files are kept.", metavar="FOLDER"),
    Setting("hf_token", _TEXT, "For the hub; without a value: the one that is stored.", metavar="TOKEN"),
    Setting("hf_overrides", _OBJECT, "Fields of config.json that are to have other values."),
    Setting("trust_remote_code", _SWITCH, "No code that comes with a checkpoint is run; see docs/from-vllm.md."),
)  # fmt: skip

_CHAT = (
    Setting("chat_template", _TEXT, "A file with a Jinja template, or the template.", _TASK),
    Setting("response_role", _TEXT, "The role of answers.", _SERVER),
    Setting(
        "generation_config",
        _TEXT,
        "auto: sampling as the checkpoint recommends; vllm: the API's defaults; or a folder with a "
        "generation_config.json.",
        _TASK,
        shown="auto",
    ),
    Setting("override_generation_config", _OBJECT, 'Defaults of sampling: {"temperature": 0.5}.', _TASK),
    Setting(
        "unknown_fields", _TEXT, "Fields that are not served: refuse them, or warn and pass over them.", _SERVER,
        choices=("refuse", "warn"),
    ),
    Setting("seed", _WHOLE, "Makes requests without a seed repeatable."),
    Setting("max_logprobs", _WHOLE, "Most logprobs of a request."),
)  # fmt: skip

_LORA = (
    Setting("enable_lora", _SWITCH, "Serve LoRA adapters."),
    Setting(
        "lora_modules", _TEXTS, "Adapters: name=path, or JSON with name, path, base_model_name.", _TASK, "modules"
    ),
    Setting(
        "lora_root", _TEXTS, "A folder that adapters may be loaded from over HTTP.", _SERVER, "lora_roots", "FOLDER"
    ),
    Setting(
        "allow_runtime_lora", _SWITCH, "Let adapters be loaded and unloaded over HTTP.", _SERVER,
        variables=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",),
    ),
    Setting(
        "lora_hub", _TEXTS, "Whose adapters may be taken from the hub over HTTP: OWNER, OWNER/NAME, or * for all.",
        _SERVER, metavar="NAME",
    ),
    Setting(
        "lora_resolver", _SWITCH, "With --allow-runtime-lora: load an adapter when it is first named (the default).",
        _SERVER,
    ),
    Setting("max_loras", _WHOLE, "Most adapters that steps can use."),
    Setting("max_cpu_loras", _WHOLE, "Most adapters in main memory."),
    Setting("max_lora_rank", _WHOLE, "A larger rank is refused."),
    Setting("lora_device_bytes", _SIZE, "For adapters that steps can use."),
    Setting("lora_host_bytes", _SIZE, "For adapters in main memory."),
)  # fmt: skip

_IMAGES = (
    Setting("limit_mm_per_prompt", _LIMITS, "Most images of a prompt: image=4, or JSON.", shown="64"),
    Setting("mm_processor_kwargs", _OBJECT, "Settings for the image processor."),
    Setting("allowed_local_media_path", _TEXT, "The folder that file: URLs may read.", metavar="FOLDER"),
    Setting("allowed_media_domains", _TEXTS, "A host that image URLs may name.", metavar="HOST"),
    Setting("media_fetch_timeout", _NUMBER, "For one image's URL.", metavar="SECONDS"),
    Setting("max_image_bytes", _SIZE, "Most bytes of an image file."),
    Setting("max_image_pixels", _SIZE, "Most pixels of an image."),
    Setting("max_image_seconds", _NUMBER, "Most CPU time to decode an image.", metavar="SECONDS"),
    Setting("media_cache_bytes", _SIZE, "For images and their features."),
)

_STEPS = (
    Setting("max_num_seqs", _WHOLE, "Most sequences in a step."),
    Setting("max_num_batched_tokens", _SIZE, "Most tokens in a step."),
    Setting("block_size", _WHOLE, "Tokens in a KV block."),
    Setting("kv_cache_memory_bytes", _SIZE, "The KV pool's size."),
    Setting("num_gpu_blocks_override", _WHOLE, "The KV pool's blocks, wherever it lies."),
    Setting(
        "gpu_memory_utilization", _NUMBER,
        "The share of a GPU's memory, or of free main memory, that may be taken.",
        shown="0.9; 0.5 of main memory", flags=("--device-memory-utilization",),
    ),
    Setting("swap_space", _NUMBER, "Main memory for preempted sequences of a GPU.", metavar="GIB", shown="4"),
    Setting("enable_prefix_caching", _SWITCH, "Reuse the KV blocks of equal beginnings (the default)."),
)  # fmt: skip

_ADDRESS = (
    Setting("host", _TEXT, "Address to listen on.", _SERVER),
    Setting("port", _WHOLE, "Port; 0 takes a free one.", _SERVER),
    Setting("uds", _TEXT, "A Unix socket's path, instead of host and port.", _SERVER),
    Setting("root_path", _TEXT, "The path under which a proxy serves this.", _SERVER),
    Setting("ssl_keyfile", _TEXT, "TLS: the private key.", _SERVER),
    Setting("ssl_certfile", _TEXT, "TLS: the certificate.", _SERVER),
    Setting(
        "api_key", _TEXTS, "Every route but /health, /ready and /ping needs it.", _SERVER, "api_keys", "KEY",
        variables=("VLLM_API_KEY",),
    ),
    Setting("admin_api_key", _TEXT, "What changes adapters or memory over HTTP needs it.", _SERVER, metavar="KEY"),
    Setting(
        "enable_admin_routes", _SWITCH, "POST /sleep, /wake_up and /reset_prefix_cache.", _SERVER,
        flags=("--enable-sleep-mode",), variables=("VLLM_SERVER_DEV_MODE",),
    ),
    Setting(
        "allowed_origins", _TEXTS, "Whose web pages may call (CORS); * is all.", _SERVER, metavar="ORIGIN"
    ),
    Setting(
        "served_model_name", _TEXTS, "What clients call the base model.", _SERVER, "served_model_names", "NAME"
    ),
)  # fmt: skip

_LIMITED = (
    Setting("max_queue", _WHOLE, "Sequences that may wait; more are answered with 429.", _SERVER),
    Setting("max_request_bytes", _SIZE, "Most bytes of a request's body.", _SERVER),
    Setting("max_prompts", _WHOLE, "Most prompts of a request.", _SERVER),
    Setting("max_n", _WHOLE, "Most answers to a prompt.", _SERVER),
    Setting("header_timeout", _NUMBER, "For a request's header.", _SERVER, metavar="SECONDS"),
    Setting("body_timeout", _NUMBER, "For a request's body.", _SERVER, metavar="SECONDS"),
    Setting(
        "timeout_keep_alive", _NUMBER, "That a connection may be idle between requests.", _SERVER, metavar="SECONDS"
    ),
    Setting("send_timeout", _NUMBER, "For a client that is behind to take 32 KiB.", _SERVER, metavar="SECONDS"),
    Setting("max_connections", _WHOLE, "Most connections at once.", _SERVER),
    Setting("unload_timeout", _NUMBER, "That unloading waits for running requests.", _SERVER, metavar="SECONDS"),
    Setting("shutdown_timeout", _NUMBER, "That running requests get at the end.", _SERVER, metavar="SECONDS"),
    Setting("step_timeout", _NUMBER, "After which /health calls a step stuck.", _SERVER, metavar="SECONDS"),
)

_LOGS = (
    Setting("log_format", _TEXT, "Lines for people, or JSON.", _TASK, shown="text", choices=("text", "json")),
    Setting(
        "log_level", _TEXT, "debug, info, warning or error.", _TASK, shown="info",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting(
        "uvicorn_log_level",
        _TEXT,
        "Of the lines about requests alone.",
        _TASK,
        shown="--log-level's",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    ),
    Setting(
        "disable_access_log", _SWITCH, "No line for each request.", _TASK, flags=("--disable-uvicorn-access-log",)
    ),
    Setting("metrics_prefix", _TEXT, "Metrics by vLLM's names too, after this: vllm:", _SERVER),
    Setting("log_probes", _SWITCH, "A line for each /health, /ready, /ping and /metrics too.", _SERVER),
)  # fmt: skip

GROUPS = (
    Group("Model", _MODEL),
    Group("Address, names and keys", _ADDRESS),
    Group("Chat and sampling", _CHAT),
    Group("LoRA adapters", _LORA),
    Group("Images", _IMAGES),
    Group("Steps and memory", _STEPS),
    Group("Limits and times", _LIMITED),
    Group("Logs", _LOGS),
)


def settings() -> Iterator[Setting]:
    """All of them, in the order of help."""
    for group in GROUPS:
        yield from group.settings
