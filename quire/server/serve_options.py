"""The options of `quire serve`: flags, QUIRE_* variables and a YAML file, in this order of precedence.

Names are vLLM's wherever both have the thing. Defaults stand in `quire.config`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from quire.server.terminal import errors_in_one_line

# typer reads these annotations at run time, and on Python 3.10 it cannot read `int | None` in a string.
_Text = Optional[str]  # noqa: UP045
_Int = Optional[int]  # noqa: UP045
_Float = Optional[float]  # noqa: UP045
_Flag = Optional[bool]  # noqa: UP045
_List = Optional[list[str]]  # noqa: UP045

_MODULES = "--lora-modules"
_OTHER_VARIABLES = {"QUIRE_KERNELS", "QUIRE_ISA"}


class ServeCommand(TyperCommand):
    """Takes several values after one --lora-modules, as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        listing = False
        for word in args:
            is_module = "=" in word or word.startswith("{")
            if listing and is_module and not word.startswith("-"):
                if spread[-1] != _MODULES:
                    spread.append(_MODULES)
                spread.append(word)
                continue
            listing = word == _MODULES or (listing and is_module)
            spread.append(word)
        return super().parse_args(ctx, spread)


class LogFormat(str, Enum):
    """How `quire serve` logs."""

    text = "text"
    json = "json"


def _option(name: str, text: str, **more: Any) -> Any:
    """--name[/--no-name], and the variable QUIRE_NAME."""
    first = name.split("/")[0].removeprefix("--")
    return typer.Option(name, help=text, envvar=f"QUIRE_{first.replace('-', '_').upper()}", **more)


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Take a YAML file's values as defaults of the options."""
    if path is None:
        return None
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path}: must hold names and values, as in 'port: 8000'.")
    known = {param.name: param for param in context.command.params if param.name not in ("config", "words", "help")}
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise typer.BadParameter(f"{path}: there is no option {key!r}.")
        several = getattr(known[name], "multiple", False)
        if isinstance(value, list) and not several:
            raise typer.BadParameter(f"{path}: {key!r} has one value, and a list was given.")
        # One value of an option that takes several need not stand in a list.
        listed = [value] if several and value is not None and not isinstance(value, list) else value
        defaults[name] = _as_given(listed)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _as_given(value: Any) -> Any:
    """A YAML value as the command line would have it: objects as JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return [_as_given(item) if isinstance(item, dict) else str(item) for item in value]
    return value


def _check_environment(context: typer.Context) -> None:
    """A key that is set to nothing must not leave the server open; a variable that no option has is a slip."""
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"):
        if name in os.environ and not os.environ[name].strip():
            raise typer.BadParameter(f"{name} is set and empty: give a key, or unset it.")
    known = {getattr(param, "envvar", None) for param in context.command.params} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in known)
    if unknown:
        typer.echo(f"warning: no option has these variables, and they are passed over: {', '.join(unknown)}", err=True)


def _object(option: str, text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{option} must be a JSON object, not {text!r}.")
    return value


def _list(option: str, values: list[str] | None) -> list[str] | None:
    """Several values; a JSON list of them counts as its entries, as in vLLM."""
    if not values:
        return None
    taken: list[str] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError:  # its text is not repeated: it may be a key
            raise typer.BadParameter(f"{option}: begins with '[' and is no JSON list.") from None
        taken += [str(one) for one in parsed]
    return taken


def serve(
    context: typer.Context,
    words: Annotated[
        _Text, typer.Argument(metavar="[MODEL]", help="A directory or hub id.", show_default="the bundled model")
    ] = None,
    config: Annotated[
        _Text,
        _option("--config", "A YAML file of these options, by their names.", callback=_read_config, is_eager=True),
    ] = None,
    model: Annotated[_Text, _option("--model", "The same as MODEL.")] = None,
    host: Annotated[_Text, _option("--host", "Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[_Int, _option("--port", "Port; 0 takes a free one.", show_default="8000")] = None,
    uds: Annotated[_Text, _option("--uds", "A Unix socket's path, instead of host and port.")] = None,
    root_path: Annotated[_Text, _option("--root-path", "The path under which a proxy serves this.")] = None,
    ssl_keyfile: Annotated[_Text, _option("--ssl-keyfile", "TLS: the private key.")] = None,
    ssl_certfile: Annotated[_Text, _option("--ssl-certfile", "TLS: the certificate.")] = None,
    api_key: Annotated[
        _List, _option("--api-key", "Every route but /health and /ready needs it. May be repeated.")
    ] = None,
    admin_api_key: Annotated[_Text, _option("--admin-api-key", "Loading and unloading adapters needs it.")] = None,
    allowed_origins: Annotated[
        _List, _option("--allowed-origins", "Whose web pages may call (CORS). May be repeated.")
    ] = None,
    served_model_name: Annotated[
        _List, _option("--served-model-name", "What clients call the base model. May be repeated.")
    ] = None,
    chat_template: Annotated[
        _Text, _option("--chat-template", "A file with a Jinja template, or the template.")
    ] = None,
    response_role: Annotated[
        _Text, _option("--response-role", "The role of answers.", show_default="assistant")
    ] = None,
    generation_config: Annotated[
        str, _option("--generation-config", "auto: sampling as the checkpoint recommends; vllm: the API's defaults.")
    ] = "auto",
    override_generation_config: Annotated[
        _Text, _option("--override-generation-config", 'Defaults of sampling, as JSON: {"temperature": 0.5}.')
    ] = None,
    enable_lora: Annotated[_Flag, _option("--enable-lora/--no-enable-lora", "Serve LoRA adapters.")] = None,
    lora_modules: Annotated[
        _List, _option("--lora-modules", "Adapters: name=path, or JSON with name, path, base_model_name. Several.")
    ] = None,
    lora_root: Annotated[
        _List, _option("--lora-root", "A folder that adapters may be loaded from over HTTP. May be repeated.")
    ] = None,
    allow_runtime_lora: Annotated[
        _Flag,
        _option("--allow-runtime-lora/--no-allow-runtime-lora", "Let adapters be loaded and unloaded over HTTP."),
    ] = None,
    max_loras: Annotated[_Int, _option("--max-loras", "Most adapters that steps can use.")] = None,
    max_lora_rank: Annotated[_Int, _option("--max-lora-rank", "A larger rank is refused.")] = None,
    max_cpu_loras: Annotated[_Int, _option("--max-cpu-loras", "Most adapters in main memory.")] = None,
    lora_device_bytes: Annotated[_Int, _option("--lora-device-bytes", "For adapters that steps can use.")] = None,
    lora_host_bytes: Annotated[_Int, _option("--lora-host-bytes", "For adapters in main memory.")] = None,
    tokenizer: Annotated[_Text, _option("--tokenizer", "Where the tokenizer is, if not with the model.")] = None,
    revision: Annotated[_Text, _option("--revision", "The hub's branch, tag or commit.")] = None,
    tokenizer_revision: Annotated[_Text, _option("--tokenizer-revision", "The same, of the tokenizer.")] = None,
    dtype: Annotated[
        _Text,
        _option("--dtype", "auto (the checkpoint's), bfloat16, float16 or float32.", show_default="auto"),
    ] = None,
    device: Annotated[_Text, _option("--device", "auto, cpu, cuda or cuda:1.", show_default="auto")] = None,
    exact_products: Annotated[
        _Flag,
        _option("--exact-products/--no-exact-products", "On a GPU: bits that do not depend on the batch, or cuBLAS."),
    ] = None,
    max_model_len: Annotated[_Int, _option("--max-model-len", "Most tokens of prompt and answer.")] = None,
    max_num_seqs: Annotated[_Int, _option("--max-num-seqs", "Most sequences in a step.", show_default="64")] = None,
    max_num_batched_tokens: Annotated[
        _Int, _option("--max-num-batched-tokens", "Most tokens in a step.", show_default="512")
    ] = None,
    block_size: Annotated[_Int, _option("--block-size", "Tokens in a KV block.", show_default="8")] = None,
    kv_cache_memory_bytes: Annotated[_Int, _option("--kv-cache-memory-bytes", "The KV pool's size.")] = None,
    num_gpu_blocks_override: Annotated[_Int, _option("--num-gpu-blocks-override", "The KV pool's blocks.")] = None,
    gpu_memory_utilization: Annotated[
        _Float,
        _option("--gpu-memory-utilization", "The share of a GPU's memory, or of free main memory, that may be taken."),
    ] = None,
    swap_space: Annotated[
        _Float, _option("--swap-space", "GiB of main memory for preempted sequences of a GPU.", show_default="4")
    ] = None,
    enable_prefix_caching: Annotated[
        _Flag,
        _option("--enable-prefix-caching/--no-enable-prefix-caching", "Reuse the KV blocks of equal beginnings."),
    ] = None,
    seed: Annotated[_Int, _option("--seed", "Makes requests without a seed repeatable.")] = None,
    max_logprobs: Annotated[_Int, _option("--max-logprobs", "Most logprobs of a request.", show_default="20")] = None,
    limit_mm_per_prompt: Annotated[
        _Text, _option("--limit-mm-per-prompt", 'Most images of a prompt, as JSON: {"image": 4}.')
    ] = None,
    mm_processor_kwargs: Annotated[
        _Text, _option("--mm-processor-kwargs", "Settings for the image processor, as JSON.")
    ] = None,
    allowed_local_media_path: Annotated[
        _Text, _option("--allowed-local-media-path", "The folder that file: URLs may read.")
    ] = None,
    allowed_media_domains: Annotated[
        _List, _option("--allowed-media-domains", "A host that image URLs may name. May be repeated.")
    ] = None,
    media_fetch_timeout: Annotated[_Float, _option("--media-fetch-timeout", "Seconds for one image's URL.")] = None,
    max_image_bytes: Annotated[_Int, _option("--max-image-bytes", "Most bytes of an image file.")] = None,
    max_image_pixels: Annotated[_Int, _option("--max-image-pixels", "Most pixels of an image.")] = None,
    media_cache_bytes: Annotated[_Int, _option("--media-cache-bytes", "For images and their features.")] = None,
    max_queue: Annotated[
        _Int, _option("--max-queue", "Sequences that may wait; more are answered with 429.", show_default="1024")
    ] = None,
    max_request_bytes: Annotated[_Int, _option("--max-request-bytes", "Most bytes of a request's body.")] = None,
    max_prompts: Annotated[_Int, _option("--max-prompts", "Most prompts of a request.", show_default="256")] = None,
    max_n: Annotated[_Int, _option("--max-n", "Most answers to a prompt.", show_default="128")] = None,
    header_timeout: Annotated[_Float, _option("--header-timeout", "Seconds for a request's header.")] = None,
    body_timeout: Annotated[_Float, _option("--body-timeout", "Seconds for a request's body.")] = None,
    unload_timeout: Annotated[
        _Float, _option("--unload-timeout", "Seconds that unloading waits for running requests.")
    ] = None,
    shutdown_timeout: Annotated[
        _Float, _option("--shutdown-timeout", "Seconds that running requests get at the end.")
    ] = None,
    step_timeout: Annotated[
        _Float, _option("--step-timeout", "Seconds after which /health calls a step stuck.")
    ] = None,
    enforce_eager: Annotated[_Flag, _option("--enforce-eager", "Never replay recorded steps.")] = None,
    trust_remote_code: Annotated[_Flag, _option("--trust-remote-code", "Refused: no remote code is run.")] = None,
    log_format: Annotated[LogFormat, _option("--log-format", "Lines for people, or JSON.")] = LogFormat.text,
    log_level: Annotated[str, _option("--log-level", "debug, info, warning or error.")] = "info",
    disable_access_log: Annotated[bool, _option("--disable-access-log", "No line for each request.")] = False,
) -> None:
    """Serve OpenAI's API over HTTP.

    Every option may also be a QUIRE_* variable (--max-num-seqs is
    QUIRE_MAX_NUM_SEQS), or stand in a YAML file (--config). Flags come before
    variables, and variables before the file. Nothing is sent anywhere: there
    are no usage statistics.
    """
    options = dict(locals())
    from quire.server import serve as command

    def some(*names: str) -> dict[str, Any]:
        return {name: options[name] for name in names if options[name] is not None}

    # MODEL comes before a variable or a file, as other flags do.
    is_flag = getattr(context.get_parameter_source("model"), "name", "") == "COMMANDLINE"
    if is_flag and words is not None and words != model:
        raise typer.BadParameter(f"MODEL is {words!r} and --model {model!r}: give one of them.")
    if generation_config not in ("auto", "vllm"):
        raise typer.BadParameter(f"--generation-config {generation_config!r}: is auto or vllm.")
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"--log-level {log_level!r}: is debug, info, warning or error.")
    _check_environment(context)
    engine = {
        "model": words or model,
        "limit_mm_per_prompt": _object("--limit-mm-per-prompt", limit_mm_per_prompt),
        "mm_processor_kwargs": _object("--mm-processor-kwargs", mm_processor_kwargs),
        "allowed_media_domains": _list("--allowed-media-domains", allowed_media_domains),
        **some(
            "tokenizer", "revision", "tokenizer_revision", "dtype", "device", "exact_products", "max_model_len",
            "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override",
            "gpu_memory_utilization", "swap_space", "enable_prefix_caching", "seed", "max_logprobs",
            "allowed_local_media_path", "media_fetch_timeout", "max_image_bytes", "max_image_pixels",
            "media_cache_bytes", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_device_bytes",
            "lora_host_bytes", "enforce_eager", "trust_remote_code",
        ),
    }  # fmt: skip
    server = {
        "api_keys": tuple(_list("--api-key", api_key) or ()),
        "served_model_names": tuple(_list("--served-model-name", served_model_name) or ()),
        "allowed_origins": tuple(_list("--allowed-origins", allowed_origins) or ()),
        "lora_roots": tuple(_list("--lora-root", lora_root) or ()),
        **some(
            "host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "admin_api_key", "response_role",
            "allow_runtime_lora", "max_queue", "max_request_bytes", "max_prompts", "max_n", "header_timeout",
            "body_timeout", "unload_timeout", "shutdown_timeout", "step_timeout",
        ),
    }  # fmt: skip
    with errors_in_one_line():
        code = command.serve(
            command.Task(
                engine,
                server,
                modules=lora_modules or (),
                generation_config=generation_config,
                chat_template=chat_template,
                log_format=log_format.value,
                log_level=log_level,
                access_log=not disable_access_log,
                override_generation_config=_object("--override-generation-config", override_generation_config) or {},
            )
        )
    raise typer.Exit(code)
