"""What a deployment of replicas is asked to be: the settings of `quire serve`, and beside them `deploy`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.config import ServerConfig
from quire.config.setting import Kind, Setting
from quire.config.settings import at, make
from quire.errors import QuireError

END = 10.0  # seconds that the end of a process takes, beyond the requests that it waits for

# Of the server's settings those that a replica cannot have: each of them would have other adapters than the others.
_ALONE = {"lora_resolver": "a replica would load adapters that the others do not have", "uds": "doors listen on ports"}


@dataclass(frozen=True)
class Replicas:
    """How many there are, and what each of them has.

    least, most, first: replicas; least may be 0. target_requests: that Ray wants each to have at once; most_requests:
    that one may have. upscale_delay, downscale_delay: seconds. drain: seconds that requests of a replica that ends may
    take. cpus: processors, which are its threads too; gpus; resources: Ray's, by name.
    """

    least: int = 1
    most: int = 1
    first: int | None = None
    target_requests: float = 16.0
    most_requests: int = 256
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    drain: float = 120.0
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Deployment:
    """settings: of `quire serve`, by name. vllm: options of vLLM's that ask for nothing else than what is done.

    name: Ray Serve's name of the application. doors: HTTP servers, on a machine each. door_resources: Ray's, by name,
    which say on which machines.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    vllm: Mapping[str, Any] = field(default_factory=dict)
    name: str = "quire"
    doors: int = 1
    door_resources: Mapping[str, float] = field(default_factory=dict)
    replicas: Replicas = Replicas()


# Names in a file -> fields.
_REPLICAS = {
    "min": "least",
    "max": "most",
    "initial": "first",
    "target_ongoing_requests": "target_requests",
    "max_ongoing_requests": "most_requests",
    "upscale_delay_s": "upscale_delay",
    "downscale_delay_s": "downscale_delay",
    "drain_s": "drain",
    "cpus": "cpus",
    "gpus": "gpus",
    "resources": "resources",
}
_TOP = {"name": "name", "doors": "doors", "door_resources": "door_resources"}


def read_deployment(given: Mapping[str, Any]) -> Deployment:
    """Of settings by name and `deploy`, a mapping. Raises QuireError for what there is not, or that cannot be."""
    rows = {row.name: row for row in at("serve")}
    settings = {name.replace("-", "_"): value for name, value in given.items() if name != "deploy"}
    if unknown := sorted(set(settings) - set(rows)):
        raise QuireError(f"{unknown[0]}: there is no such setting; `quire serve --help` lists them.")
    return deployment({**_keys(rows.values()), **settings}, {}, given.get("deploy"))


def _keys(rows: Iterable[Setting]) -> dict[str, Any]:
    """Secrets, which no file needs to have: from their variables, as `quire serve` takes them."""
    found = {row: os.environ[row.variable] for row in rows if row.secret and os.environ.get(row.variable)}
    return {row.name: [value] if row.kind is Kind.TEXTS else value for row, value in found.items()}


def deployment(settings: Mapping[str, Any], vllm: Mapping[str, Any], deploy: Any) -> Deployment:
    """Of settings that are known. deploy: the mapping, or None. Raises QuireError."""
    for name, why in _ALONE.items():
        if settings.get(name):
            raise QuireError(f"{name} is not for replicas: {why}.")
    make(ServerConfig, settings)
    told = _mapping("deploy", {} if deploy is None else deploy)
    of_replicas = _taken("deploy.replicas", _mapping("deploy.replicas", told.pop("replicas", {})), _REPLICAS, Replicas)
    wanted = _taken("deploy", told, _TOP, Deployment)
    found = Deployment(settings, vllm, **wanted, replicas=Replicas(**of_replicas))
    _check(found)
    return found


def _mapping(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise QuireError(f"{name}: must be a mapping of names and values.")
    return dict(given)


def _taken(where: str, given: Mapping[str, Any], names: Mapping[str, str], kind: type) -> dict[str, Any]:
    """Fields of a dataclass by the names that a file has."""
    defaults = kind()
    hints = {one.name: one.type for one in fields(kind)}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(key)
        if name is None:
            raise QuireError(f"{where}.{key}: there is no such key; there are {', '.join(names)}.")
        default = getattr(defaults, name)
        wanted: Any = int if "int" in hints[name] else float if hints[name] == "float" else type(default)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, Mapping if wanted is dict else wanted) or isinstance(value, bool):
            raise QuireError(f"{where}.{key}={value!r}: must be of type {wanted.__name__}.")
        found[name] = value
    return found


def _check(wanted: Deployment) -> None:
    """Raises QuireError."""
    of = wanted.replicas
    if not (0 <= of.least <= of.most and of.most >= 1):
        raise QuireError(f"deploy.replicas: min={of.least}, max={of.most}: 0 <= min <= max, and max is 1 at least.")
    if of.first is not None and not of.least <= of.first <= of.most:
        raise QuireError(f"deploy.replicas.initial={of.first}: is from min={of.least} to max={of.most}.")
    positive = {
        "target_ongoing_requests": of.target_requests,
        "max_ongoing_requests": of.most_requests,
        "cpus": of.cpus,
    }
    for key, value in positive.items():
        if not 0 < value < float("inf"):
            raise QuireError(f"deploy.replicas.{key}={value}: must be above 0.")
    zero = {"upscale_delay_s": of.upscale_delay, "downscale_delay_s": of.downscale_delay, "drain_s": of.drain,
            "gpus": of.gpus}  # fmt: skip
    for key, value in zero.items():
        if not 0 <= value < float("inf"):
            raise QuireError(f"deploy.replicas.{key}={value}: must be 0 or more.")
    if wanted.doors < 1:
        raise QuireError(f"deploy.doors={wanted.doors}: must be 1 at least.")
