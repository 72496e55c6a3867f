"""What callers give to `LLM`, in its accepted forms -> what settings and the engine take."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import CacheConfig, EngineConfig, LoRAConfig, MediaConfig, ModelConfig, SchedulerConfig
from quire.errors import QuireError, RequestError

_GENERATION = "generation_config.json"
_GIB = 1 << 30


def engine_config(
    *,
    model: str | None = None,
    limit_mm_per_prompt: Mapping[str, int] | None = None,
    allowed_media_domains: Sequence[str] | None = None,
    lora_roots: Sequence[str] | None = None,
    swap_space: float | None = None,
    **arguments: Any,
) -> EngineConfig:
    """The settings that arguments of `LLM` ask for, by the names that it has for them; None leaves a default.

    Raises QuireError for a value out of bounds, and TypeError for an unknown name.
    """
    checked = {
        **arguments,
        "dtype": _dtype(arguments.get("dtype")),
        # vLLM's way of leaving these open
        "max_model_len": None if arguments.get("max_model_len") in (-1, "auto") else arguments.get("max_model_len"),
        "hf_token": True if str(arguments.get("hf_token")).lower() == "true" else arguments.get("hf_token"),
        "allowed_local_media_path": arguments.get("allowed_local_media_path") or None,
        "swap_space": _gibibytes(swap_space),
        "model": str(model) if model is not None else None,
        "limit_mm_per_prompt": _image_limit(limit_mm_per_prompt),
        "allowed_media_domains": _hosts(allowed_media_domains),
        "lora_roots": _folders(lora_roots),
    }
    given = {name: value for name, value in checked.items() if value is not None}
    unknown = set(checked) - {name for names in _ARGUMENTS.values() for name in names}
    if unknown:
        raise TypeError(f"unknown argument: {', '.join(sorted(unknown))}")
    sections = {
        section: kind(**{field: given[name] for name, field in _ARGUMENTS[section].items() if name in given})
        for section, kind in _SECTIONS.items()
    }
    rest = {field: given[name] for name, field in _ARGUMENTS["engine"].items() if name in given}
    return EngineConfig(**sections, **rest)


def default_of(argument: str) -> Any:
    """The default of an argument's setting, in the setting's unit. Raises KeyError for an unknown name."""
    kind, name = _home_of(argument)
    return {field.name: field.default for field in dataclasses.fields(kind)}[name]


def type_of(argument: str) -> type | None:
    """bool or str where an argument is just that, or None; else None."""
    try:
        kind, name = _home_of(argument)
    except KeyError:
        return None
    return {"bool": bool, "str": str, "str | None": str}.get(kind.__annotations__[name])


def _home_of(argument: str) -> tuple[Any, str]:
    """The configuration that has an argument, and its field there. Raises KeyError."""
    for section, fields in _ARGUMENTS.items():
        if argument in fields:
            return _SECTIONS.get(section, EngineConfig), fields[argument]
    raise KeyError(argument)


def check_generation_config(given: str | None) -> str:
    """What was given, or "auto". Raises QuireError unless it is that, "vllm" or a folder with one."""
    if given not in (None, "auto", "vllm") and not os.path.isfile(os.path.join(str(given), _GENERATION)):
        raise QuireError(f"generation_config={given!r}: is auto, vllm or a folder that has {_GENERATION}.")
    return given or "auto"


def default_sampling(path: Path, generation_config: str, override: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `SamplingParams` that hold where nothing is said. path: the checkpoint's."""
    source = {"auto": path, "vllm": None}.get(generation_config, Path(generation_config))
    return {**(recommended_sampling(source) if source is not None else {}), **override}


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """A file's text, or the text itself where it is a template. Raises QuireError for a file that cannot be read."""
    if chat_template is None or "{" in str(chat_template):
        return chat_template if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuireError(f"chat_template {chat_template}: cannot be read ({error}).") from None


def recommended_sampling(path: Path) -> dict[str, Any]:
    """The arguments of `SamplingParams` that a checkpoint's generation_config.json recommends; none without one."""
    try:
        recommended = json.loads((path / _GENERATION).read_text())
    except (OSError, ValueError):
        return {}
    fields = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    wanted = {name: value for name, value in recommended.items() if name in fields and value is not None}
    if recommended.get("max_new_tokens"):
        wanted["max_tokens"] = recommended["max_new_tokens"]
    return wanted


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or several -> a list of prompts. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)) or hasattr(prompts, "tolist"):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text, a list of token ids, a dict or a list of these, not {prompts!r}")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def one_for_each(name: str, given: Any, kinds: tuple[type, ...], count: int) -> list[Any]:
    """One for all prompts, or a list of one for each -> the list. Raises RequestError."""
    if isinstance(given, kinds):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kinds) for one in given):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise RequestError(f"{name} must be {names}, or a list of one for each prompt, not {given!r}")
    if len(given) != count:
        raise RequestError(f"{count} prompts, but {len(given)} {name}: give one, or one for each.")
    return list(given)


def _gibibytes(size: float | None) -> int | None:
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < 1 << 20:
        raise RequestError(f"swap_space={size!r}: must be a number of GiB, 0 or more.")
    return int(size * _GIB)


def _hosts(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"allowed_media_domains={names!r}: must be a list of host names.")
    return tuple(names)


def _folders(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    if paths is None:
        return None
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
        raise RequestError(f"lora_roots={paths!r}: must be a list of folders.")
    return tuple(str(path) for path in paths)


def _image_limit(limits: Mapping[str, Any] | None) -> int | None:
    """{"image": 4}, or as vLLM also has it {"image": {"count": 4, ...}}; other media may be limited to none."""
    if limits is None:
        return None
    others = set(limits) - {"image"} if isinstance(limits, Mapping) else {None}
    if None in others or any(limits[name] != 0 for name in others):
        raise RequestError(f"limit_mm_per_prompt={limits!r}: must be {{'image': a number}}; no other media are served.")
    images = limits.get("image")
    if isinstance(images, Mapping):
        if set(images) - {"count", "width", "height"}:  # how large the made-up ones are that vLLM measures memory with
            raise RequestError(f"limit_mm_per_prompt: 'image' has a count, not {sorted(images)}.")
        images = images.get("count")
    return images


def _dtype(dtype: Any) -> Any:
    """A torch dtype by its name."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else dtype


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "media": MediaConfig,
    "lora": LoRAConfig,
}

# By section of `EngineConfig` ("engine": its own): argument -> field.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "model": _same(
        "model", "tokenizer", "revision", "tokenizer_revision", "dtype", "load_format", "max_model_len",
        "skip_tokenizer_init", "enforce_eager", "trust_remote_code", "device", "exact_products", "download_dir",
        "hf_token", "hf_overrides",
    ),
    "cache": {
        "block_size": "block_size",
        "num_gpu_blocks_override": "num_blocks",
        "kv_cache_memory_bytes": "memory_bytes",
        "gpu_memory_utilization": "memory_fraction",
        "swap_space": "swap_bytes",
        "enable_prefix_caching": "enable_prefix_caching",
    },
    "scheduler": _same("max_num_seqs", "max_num_batched_tokens"),
    "media": {
        "limit_mm_per_prompt": "max_images",
        "mm_processor_kwargs": "processor_settings",
        "media_cache_bytes": "cache_bytes",
        **_same(
            "allowed_local_media_path", "allowed_media_domains", "media_fetch_timeout", "max_image_bytes",
            "max_image_pixels", "max_image_seconds",
        ),
    },
    "lora": {
        "enable_lora": "enabled",
        "lora_device_bytes": "device_bytes",
        "lora_host_bytes": "host_bytes",
        "lora_roots": "roots",
        **_same("max_loras", "max_lora_rank", "max_cpu_loras"),
    },
    "engine": _same("seed", "max_logprobs", "debug"),
}  # fmt: skip

ENGINE_ARGUMENTS = tuple(argument for fields in _ARGUMENTS.values() for argument in fields)
