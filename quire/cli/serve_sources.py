"""Where the options of `quire serve` come from beside flags: a YAML file and variables."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from quire.cli.serve_words import BESIDE
from quire.cli.yaml_file import read_yaml
from quire.config.settings import at

OF_VLLM = "quire.of_vllm"  # where a context keeps options of vLLM's

_NO_OPTIONS = {"config", "words", "help"}  # parameters that a file cannot give
_KEYS = ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY", "VLLM_API_KEY")
_OTHER_VARIABLES = {"QUIRE_KERNELS", "QUIRE_ISA", "QUIRE_CONFIG", "QUIRE_CACHE", "VLLM_USE_MODELSCOPE"}


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Take a YAML file's values as defaults of the options. Raises BadParameter."""
    if path is None:
        return None
    try:
        given = read_yaml(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path}: must hold names and values, as in 'port: 8000'.")
    known = {param.name: param for param in context.command.params if param.name not in _NO_OPTIONS}
    names = {flag.lstrip("-"): param.name for param in known.values() for flag in param.opts}
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(str(key).replace("_", "-"))
        of_vllm = str(key).replace("-", "_")
        if name is None and of_vllm in BESIDE:
            context.meta[OF_VLLM][of_vllm] = value
            continue
        if name is None:
            raise typer.BadParameter(f"{path}: there is no option {key!r}.")
        if name in defaults:
            raise typer.BadParameter(f"{path}: {key!r} is there twice, by two of its names.")
        try:
            defaults[name] = _default(value, getattr(known[name], "multiple", False))
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {key!r} {error}.") from None
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _default(value: Any, several: bool) -> Any:
    """A key's value as an option's default. several: whether the option takes more than one. Raises ValueError."""
    if isinstance(value, list) and not several:
        raise ValueError("has one value, and a list was given")
    # One value of an option that takes several need not stand in a list.
    listed = [value] if several and value is not None and not isinstance(value, list) else value
    if isinstance(listed, list) and None in listed:
        raise ValueError("has an entry without a value")
    return _as_given(listed)


def _as_given(value: Any) -> Any:
    """A YAML value as the command line would have it: objects as JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return [_as_given(item) if isinstance(item, dict) else str(item) for item in value]
    return value


def check_environment() -> None:
    """A key that is set to nothing must not leave the server open; a variable that no option has is a slip."""
    for name in _KEYS:
        if name in os.environ and not os.environ[name].strip():
            raise typer.BadParameter(f"{name} is set and empty: give a key, or unset it.")
    known = {name for setting in at("serve") for name in (setting.variable, *setting.variables)} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith(("QUIRE_", "VLLM_")) and name not in known)
    if unknown:
        typer.echo(f"warning: no option has these variables, and they are passed over: {', '.join(unknown)}", err=True)
