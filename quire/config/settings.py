"""The table of settings: every row of every configuration.

To add a setting is to add a row, where its field belongs; see docs/adding-a-setting.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.lora import LoRAConfig
from quire.config.media import MediaConfig
from quire.config.model import ModelConfig
from quire.config.server import ServerConfig
from quire.config.setting import ALL, SERVE_ONLY, Door, Group, Setting, rows
from quire.config.start import LaunchConfig, RequestDefaults
from quire.config.steps import CacheConfig, SchedulerConfig

# The parts of an `EngineConfig`, by its fields; EngineConfig itself has rows too.
ENGINE_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "media": MediaConfig,
    "lora": LoRAConfig,
}
ENGINE = frozenset((*ENGINE_PARTS.values(), EngineConfig))

# Every configuration, and who sets it.
_CONFIGURATIONS: dict[Any, tuple[Door, ...]] = {
    ModelConfig: ALL,
    CacheConfig: ALL,
    SchedulerConfig: ALL,
    RequestDefaults: ALL,
    MediaConfig: ALL,
    LaunchConfig: SERVE_ONLY,
    ServerConfig: SERVE_ONLY,
    LoRAConfig: ALL,
    EngineConfig: ALL,
}

FIELDS: tuple[Setting, ...] = tuple(row for config, doors in _CONFIGURATIONS.items() for row in rows(config, doors))
"""All rows, those too that nobody sets."""

SETTINGS: tuple[Setting, ...] = tuple(row for group in Group for row in FIELDS if row.group is group and row.doors)
"""What can be set, in the order of help and docs."""


def at(door: Door) -> tuple[Setting, ...]:
    """What a door takes, in the order of help."""
    return tuple(row for row in SETTINGS if door in row.doors)


def engine_settings() -> tuple[Setting, ...]:
    """What an `EngineConfig` is made of."""
    return tuple(row for row in SETTINGS if row.config in ENGINE)


def fields_of(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that arguments, by their names, set. None, and other names, are left out."""
    wanted = [row for row in SETTINGS if row.config is config and given.get(row.name) is not None]
    fields = {row.field: row.value(given[row.name]) for row in wanted}
    return {name: value for name, value in fields.items() if value is not None}


def make(config: Any, given: Mapping[str, Any]) -> Any:
    """A configuration of these. Raises QuireError for a value out of bounds."""
    return config(**fields_of(config, given))
