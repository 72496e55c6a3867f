"""What callers give to `LLM`, in its accepted forms -> what settings and the engine take."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import CacheConfig, EngineConfig, LoRAConfig, MediaConfig, ModelConfig, SchedulerConfig
from quire.errors import RequestError


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
    section = next((name for name, fields in _ARGUMENTS.items() if argument in fields), None)
    if section is None:
        raise KeyError(argument)
    kind = _SECTIONS.get(section, EngineConfig)
    return {field.name: field.default for field in dataclasses.fields(kind)}[_ARGUMENTS[section][argument]]


def recommended_sampling(path: Path) -> dict[str, Any]:
    """The arguments of `SamplingParams` that a checkpoint's generation_config.json recommends; none without one."""
    try:
        recommended = json.loads((path / "generation_config.json").read_text())
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


def _gibibytes(size: float | None) -> int | None:
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < 1 << 20:
        raise RequestError(f"swap_space={size!r}: must be a number of GiB, 0 or more.")
    return int(size * (1 << 30))


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


def _image_limit(limits: Mapping[str, int] | None) -> int | None:
    if limits is None:
        return None
    if not isinstance(limits, Mapping) or set(limits) - {"image"}:
        raise RequestError(f"limit_mm_per_prompt={limits!r}: must be {{'image': a number}}; no other media are served.")
    return limits.get("image")


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
        "skip_tokenizer_init", "enforce_eager", "trust_remote_code", "device", "exact_products",
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
            "max_image_pixels",
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
