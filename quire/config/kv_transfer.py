"""Blocks of keys and values that outlive the pool: where they are kept, and how much."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from quire.errors import QuireError

DISK = "DiskConnector"
BOTH, CONSUMER = "kv_both", "kv_consumer"  # of vLLM's roles

_GIB = 1 << 30
_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "engine_id")
_DISK_KEYS = ("path", "max_bytes")
_MIN_TOKENS = 32
_NUMBERS = {"min_tokens": _MIN_TOKENS, "max_loading_bytes": _GIB, "max_storing_bytes": _GIB // 4}
# What vLLM has and quire has not, with the values that ask for nothing.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "kv_buffer_device": ("cuda", "cpu"),
    "kv_buffer_size": (1e9,),
    "kv_rank": (None,),
    "kv_parallel_size": (1,),
    "kv_ip": ("127.0.0.1",),
    "kv_port": (14579,),
    "kv_connector_module_path": (None,),
    "enable_permute_local_kv": (False,),
    "kv_load_failure_policy": ("recompute",),
}


@dataclass(frozen=True)
class KVTransferConfig:
    """Where blocks are kept beside the pool.

    connector: DiskConnector, or that of a package, by `module:Class` or the name of its entry point. path: a folder;
    max_bytes: of its files at most. role: kv_both stores and loads; kv_consumer loads what another engine stores.
    min_tokens: fewer than so many are computed and not loaded. max_loading_bytes: that are read and not in the pool
    yet, at most; max_storing_bytes: that wait to be written, beyond which nothing is stored. All bytes are of one
    process; extra: what the connector of a package is told.
    """

    connector: str
    min_tokens: int = _MIN_TOKENS
    max_loading_bytes: int = _GIB
    max_storing_bytes: int = _GIB // 4
    path: str = ""
    max_bytes: int = 0
    role: str = BOTH
    extra: Mapping[str, Any] = field(default_factory=dict)


def kv_transfer(given: Any) -> KVTransferConfig:
    """vLLM's kv_transfer_config, a mapping. Raises QuireError for what is not served."""
    if not isinstance(given, Mapping):
        raise QuireError(f"kv_transfer_config={given!r}: must be an object, {_example()} for one.")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name in _NOT_SERVED and value not in _NOT_SERVED[name]:
            raise QuireError(
                f"kv_transfer_config: {name}={value!r}: blocks are not sent between engines; leave it out."
            )
        if name not in _NOT_SERVED and name not in _KEYS:
            raise QuireError(f"kv_transfer_config: {name!r} is unknown; it has {', '.join(_KEYS)}.")
    connector, role = fields.get("kv_connector"), fields.get("kv_role", BOTH)
    if role not in (BOTH, CONSUMER):
        raise QuireError(
            f"kv_transfer_config: kv_role={role!r}: an engine that stores loads too; take {BOTH}, or {CONSUMER} for "
            "one that reads what another stores."
        )
    if not isinstance(connector, str) or not connector:
        raise QuireError(f"kv_transfer_config: kv_connector={connector!r}: is {DISK}, or that of a package.")
    extra = fields.get("kv_connector_extra_config", MappingProxyType({}))
    if not isinstance(extra, Mapping):
        raise QuireError(f"kv_transfer_config: kv_connector_extra_config={extra!r}: must be an object.")
    numbers = {name: _number(name, extra.get(name, default)) for name, default in _NUMBERS.items()}
    rest = {name: value for name, value in extra.items() if name not in _NUMBERS}
    config = KVTransferConfig(
        connector, numbers["min_tokens"], numbers["max_loading_bytes"], numbers["max_storing_bytes"], extra=rest
    )
    if connector != DISK:
        if role != BOTH:
            raise QuireError(
                f"kv_transfer_config: kv_role={role!r}: is {DISK}'s alone; take {BOTH} with {connector!r}."
            )
        return config
    for name in rest:
        if name not in _DISK_KEYS:
            raise QuireError(
                f"kv_connector_extra_config: {name!r} is unknown to {DISK}, which has "
                f"{', '.join((*_DISK_KEYS, *_NUMBERS))}."
            )
    for name in ("max_bytes", "max_storing_bytes"):
        if role == CONSUMER and name in extra:
            raise QuireError(f"kv_connector_extra_config: {name}: a {CONSUMER} writes nothing; leave it out.")
    path = rest.get("path")
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise QuireError(f"kv_connector_extra_config: path={path!r}: must be a folder, as in {_example()}.")
    path = os.path.expanduser(os.fspath(path))
    if role == CONSUMER:
        return replace(config, path=path, role=role, extra={})
    if "max_bytes" not in rest:
        raise QuireError("kv_connector_extra_config: max_bytes: must say how many bytes the folder may take.")
    most = _number("max_bytes", rest["max_bytes"])
    return replace(config, path=path, max_bytes=most, extra={})


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise QuireError(f"kv_connector_extra_config: {name}={value!r}: must be a whole number, 1 or more.")
    return int(value)


def _example() -> str:
    return (
        '{"kv_connector": "DiskConnector", "kv_connector_extra_config": {"path": "/var/cache/kv", "max_bytes": 1e10}}'
    )
