"""The HTTP server."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.setting import Checked, Group, Kind, found, seconds, setting
from quire.errors import QuireError

_ADDRESS, _CHAT, _LORA, _LIMITS, _LOGS = Group.ADDRESS, Group.CHAT, Group.LORA, Group.LIMITS, Group.LOGS


def _check_key(key: Any) -> None:
    if not key or not isinstance(key, str) or not key.isascii() or not key.isprintable() or " " in key:
        raise QuireError("api_key, admin_api_key: a key is printable ASCII without spaces, and not empty.")


def _check_keys(keys: Any) -> None:
    for key in keys if isinstance(keys, tuple) else ():
        _check_key(key)


def _check_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str) or not re.fullmatch(r"(?!quire_)([a-zA-Z_:][a-zA-Z0-9_:]*)?", prefix):
        raise QuireError(f"metrics_prefix={prefix!r}: is of letters, digits, _ and :, as vllm:, and not quire_.")


@dataclass(frozen=True)
class ServerConfig(Checked):
    """The HTTP server: where it listens, whom it lets in, and how much it takes."""

    host: str = setting("127.0.0.1", "Address to listen on.", group=_ADDRESS, vllm=True)
    port: int = setting(8000, "Port; 0 takes a free one.", group=_ADDRESS, at_least=0, at_most=65535, vllm=True)
    uds: str | None = setting(None, "A Unix socket's path, instead of host and port.", group=_ADDRESS, vllm=True)
    root_path: str = setting("", "The path under which a proxy serves this.", group=_ADDRESS, vllm=True)
    ssl_keyfile: str | None = setting(None, "TLS: the private key.", group=_ADDRESS, vllm=True)
    ssl_certfile: str | None = setting(None, "TLS: the certificate.", group=_ADDRESS, vllm=True)
    api_keys: tuple[str, ...] = setting(
        (),
        "Every route but /health, /ready and /ping needs it.",
        more="One of them is enough; without any, all routes are open.",
        group=_ADDRESS,
        name="api_key",
        metavar="KEY",
        secret=True,
        check=_check_keys,
        variables=("VLLM_API_KEY",),
        vllm=True,
    )
    admin_api_key: str | None = setting(
        None,
        "What changes adapters or memory over HTTP needs it.",
        more="It opens the other routes too.",
        group=_ADDRESS,
        metavar="KEY",
        secret=True,
        check=_check_key,
    )
    enable_admin_routes: bool = setting(
        False,
        "POST /sleep, /wake_up and /reset_prefix_cache.",
        group=_ADDRESS,
        variables=("VLLM_SERVER_DEV_MODE",),
        vllm="enable_sleep_mode",
    )
    page: bool = setting(
        True,
        "The page for browsers at / (the default).",
        more="Its files need no key; what it asks of the API does.",
        group=_ADDRESS,
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "Whose web pages may call (CORS); * is all.", group=_ADDRESS, metavar="ORIGIN", vllm=True
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "What clients call the base model.",
        more='None: as it was named, or "quire-demo".',
        group=_ADDRESS,
        name="served_model_name",
        metavar="NAME",
        vllm=True,
    )
    response_role: str = setting("assistant", "The role of answers.", group=_CHAT, vllm=True)
    exclude_tools_when_tool_choice_none: bool = setting(
        True, 'With tool_choice "none" the template is not told of tools (the default).', group=_CHAT, vllm=True
    )
    unknown_fields: str = setting(
        "refuse",
        "Fields that are not served: refuse them, or warn and pass over them.",
        group=_CHAT,
        choices=("refuse", "warn"),
    )
    lora_roots: tuple[str, ...] = setting(
        (),
        "A folder that adapters may be loaded from over HTTP.",
        group=_LORA,
        name="lora_root",
        metavar="FOLDER",
    )
    allow_runtime_lora: bool = setting(
        False,
        "Let adapters be loaded and unloaded over HTTP.",
        more="From under `--lora-root` alone, or as an upload.",
        group=_LORA,
        variables=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",),
    )
    lora_hub: tuple[str, ...] = setting(
        (),
        "Whose adapters may be taken from the hub over HTTP: OWNER, OWNER/NAME, or * for all.",
        group=_LORA,
        metavar="NAME",
    )
    lora_resolver: bool = setting(
        True, "With --allow-runtime-lora: load an adapter when it is first named (the default).", group=_LORA
    )
    adapter_store_dir: str | None = setting(
        None,
        "The folder in which uploaded adapters lie until they are unloaded; None: the system's for temporary files.",
        group=_LORA,
        metavar="FOLDER",
    )
    adapter_store_bytes: int = setting(
        16 << 30, "Disk for adapters that were uploaded.", group=_LORA, kind=Kind.SIZE, at_least=1
    )
    max_adapter_upload_bytes: int = setting(
        1 << 30,
        "Most bytes of an adapter that is uploaded, packed and unpacked.",
        more="`--max-request-bytes` is for all other bodies.",
        group=_LORA,
        kind=Kind.SIZE,
        at_least=1,
    )
    max_queue: int = setting(1024, "Sequences that may wait; more are answered with 429.", group=_LIMITS, at_least=0)
    max_request_bytes: int = setting(
        32 << 20, "Most bytes of a request's body.", group=_LIMITS, kind=Kind.SIZE, at_least=1
    )
    response_store_bytes: int = setting(
        0,
        "Memory for responses of /v1/responses that are kept; 0 keeps none.",
        more="`previous_response_id`, `background` and GET /v1/responses/NAME need it.",
        group=_LIMITS,
        kind=Kind.SIZE,
        at_least=0,
    )
    max_prompts: int = setting(256, "Most prompts of a request.", group=_LIMITS, at_least=1)
    max_texts: int = setting(2048, "Most texts of a request for vectors, classes or scores.", group=_LIMITS, at_least=1)
    max_n: int = setting(128, "Most answers to a prompt.", group=_LIMITS, at_least=1)
    header_timeout: float = seconds(10.0, "For a request's header.", group=_LIMITS)
    body_timeout: float = seconds(60.0, "For a request's body.", group=_LIMITS)
    timeout_keep_alive: float = seconds(30.0, "That a connection may be idle between requests.", group=_LIMITS)
    send_timeout: float = seconds(60.0, "For a client that is behind to take 32 KiB.", group=_LIMITS)
    max_connections: int = setting(
        2048,
        "Most connections at once.",
        more="As many as the limit of open files allows, where that is less.",
        group=_LIMITS,
        at_least=1,
    )
    unload_timeout: float = seconds(
        30.0, "That unloading waits for running requests.", more="Going to sleep waits as long.", group=_LIMITS
    )
    shutdown_timeout: float = seconds(30.0, "That running requests get at the end.", group=_LIMITS, vllm=True)
    step_timeout: float = seconds(300.0, "After which /health calls a step stuck.", group=_LIMITS)
    metrics_prefix: str = setting(
        "", "Metrics by vLLM's names too, after this: vllm:", group=_LOGS, check=_check_prefix
    )
    log_probes: bool = setting(False, "A line for each /health, /ready, /ping and /metrics too.", group=_LOGS)
    chat_template: str | None = found(None, "Jinja, used instead of the tokenizer's.")
    tool_call_parser: str | None = found(None, "The format of calls of tools; None: as the template tells.")
    reasoning_parser: str | None = found(None, "The format of reasoning; None: as the template tells.")
    tool_strict: bool = found(True, "Whether calls' arguments match their tools' schemas.")
    default_sampling: Mapping[str, object] = found({}, "SamplingParams that hold where a request says nothing.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise QuireError("ssl_keyfile and ssl_certfile belong together: give both.")
