"""`quire serve`: flags, QUIRE_* variables and a YAML file, in this order of precedence, for the settings of the table.

Names are vLLM's wherever both have the thing. Defaults stand in `quire.config`.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from quire.cli.serve_words import BESIDE, Words
from quire.cli.terminal import INTERRUPTED, ended_by, errors_in_one_line
from quire.cli.yaml_file import read_yaml
from quire.config.from_vllm import check
from quire.config.serve_settings import GROUPS, Kind, Setting, Target, settings
from quire.errors import QuireError
from quire.server.logs import configure

logger = logging.getLogger("quire.server")

_TYPES: dict[Kind, Any] = {
    Kind.WHOLE: int | None,
    Kind.NUMBER: float | None,
    Kind.SWITCH: bool | None,
    Kind.TEXTS: list[str] | None,
}
_TEXT: Any = str | None

_METAVARS = {
    Kind.TEXT: "TEXT", Kind.WHOLE: "N", Kind.NUMBER: "N", Kind.SIZE: "N", Kind.TEXTS: "TEXT...", Kind.OBJECT: "JSON",
    Kind.LIMITS: "image=N",
}  # fmt: skip
_OF_VLLM = "quire.of_vllm"  # where a context keeps options of vLLM's
_OTHER_VARIABLES = {"QUIRE_KERNELS", "QUIRE_ISA", "QUIRE_CONFIG", "QUIRE_CACHE", "VLLM_USE_MODELSCOPE"}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ServeCommand(TyperCommand):
    """Takes what vLLM's parser takes beside click's, and shows its options in groups, each name whole."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rich_markup_mode = None  # whose tables cut long names

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = Words(self.params)
        try:
            taken = words.as_click_takes_them(args)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        ctx.meta[_OF_VLLM] = {}
        left = super().parse_args(ctx, taken)
        ctx.meta[_OF_VLLM].update(words.of_vllm)  # after the file's
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Arguments"):
            formatter.write_dl([("[MODEL]", "A directory or hub id; the bundled model if there is none.")])
        for group in GROUPS:
            with formatter.section(group.title):
                formatter.write_dl([(_shown(setting), _help(setting)) for setting in group.settings])
        with formatter.section("Other"):
            formatter.write_dl(
                [
                    ("--config FILE", "A YAML file of these options, by their names."),
                    ("-h, --help", "Show this and leave."),
                ]
            )


def _shown(setting: Setting) -> str:
    if setting.kind is Kind.SWITCH:
        return setting.flag if _is_plain(setting) else f"--[no-]{setting.flag[2:]}"
    metavar = setting.metavar or _METAVARS[setting.kind]
    several = "..." if setting.kind is Kind.TEXTS and setting.metavar else ""
    return f"{setting.flag} {metavar}{several}"


def _help(setting: Setting) -> str:
    return setting.help if setting.default is None else f"{setting.help} [{setting.default}]"


def _is_plain(setting: Setting) -> bool:
    """A switch that is off unless it is given, as its name says that something is turned off."""
    return setting.name.startswith("disable_")


def _option(setting: Setting) -> Any:
    flags = [setting.flag, *setting.flags]
    if setting.kind is Kind.SWITCH and not _is_plain(setting):
        flags[0] += f"/--no-{setting.flag[2:]}"
    variables = [setting.variable, *setting.variables] if setting.variables else setting.variable
    return typer.Option(*flags, help=setting.help, envvar=variables)


def _of_vllm(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of vLLM's that were given, each checked. Raises BadParameter for one that is refused."""
    wanted = {name: value for name, value in ((name, _plain(one)) for name, one in given.items()) if value is not None}
    for name, value in wanted.items():
        try:
            check("serve", name, value)
        except QuireError as error:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: {error}") from None
    return wanted


def _plain(given: Any) -> Any:
    """What a word means: a number, a JSON value, None, or itself."""
    if not isinstance(given, str):
        return given
    if given in ("", "None", "null"):
        return None
    try:
        return json.loads(given)
    except ValueError:
        return given


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Take a YAML file's values as defaults of the options."""
    if path is None:
        return None
    try:
        given = read_yaml(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path}: must hold names and values, as in 'port: 8000'.")
    known = {param.name: param for param in context.command.params if param.name not in ("config", "words", "help")}
    names = {flag.lstrip("-"): param.name for param in known.values() for flag in param.opts}
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(str(key).replace("_", "-"))
        of_vllm = str(key).replace("-", "_")
        if name is None and of_vllm in BESIDE:
            context.meta[_OF_VLLM][of_vllm] = value
            continue
        if name is None:
            raise typer.BadParameter(f"{path}: there is no option {key!r}.")
        several = getattr(known[name], "multiple", False)
        if isinstance(value, list) and not several:
            raise typer.BadParameter(f"{path}: {key!r} has one value, and a list was given.")
        # One value of an option that takes several need not stand in a list.
        listed = [value] if several and value is not None and not isinstance(value, list) else value
        if isinstance(listed, list) and None in listed:
            raise typer.BadParameter(f"{path}: {key!r} has an entry without a value.")
        if name in defaults:
            raise typer.BadParameter(f"{path}: {key!r} is there twice, by two of its names.")
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


def _check_environment() -> None:
    """A key that is set to nothing must not leave the server open; a variable that no option has is a slip."""
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY", "VLLM_API_KEY"):
        if name in os.environ and not os.environ[name].strip():
            raise typer.BadParameter(f"{name} is set and empty: give a key, or unset it.")
    known = {name for setting in settings() for name in (setting.variable, *setting.variables)} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith(("QUIRE_", "VLLM_")) and name not in known)
    if unknown:
        typer.echo(f"warning: no option has these variables, and they are passed over: {', '.join(unknown)}", err=True)


def _value(setting: Setting, given: Any) -> Any:
    """What an option's value means. None: it was not given. Raises BadParameter."""
    if given is None or setting.kind in (Kind.WHOLE, Kind.NUMBER, Kind.SWITCH):
        return given
    if setting.name == "max_model_len" and given == "auto":
        return -1  # vLLM's way of leaving it open
    if setting.kind is Kind.SIZE:
        return _size(setting.flag, given)
    if setting.kind is Kind.TEXTS:
        return _list(setting.flag, given)
    if setting.kind in (Kind.OBJECT, Kind.LIMITS):
        return _object(setting, given)
    if setting.choices and given.lower() not in setting.choices:
        raise typer.BadParameter(f"{setting.flag} {given!r}: is {' or '.join(setting.choices)}.")
    return given


def _size(option: str, text: str) -> int:
    number, factor = text, 1
    if text[-1:] in _SUFFIXES:
        number, factor = text[:-1], _SUFFIXES[text[-1]]
    try:
        return int(number) if factor == 1 else int(float(number) * factor)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{option} {text!r}: must be a whole number; k is a thousand, K is 1024, and so on to t and T."
        ) from None


def _object(setting: Setting, text: str) -> Mapping[str, Any]:
    if setting.kind is Kind.LIMITS and "=" in text and not text.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in text.split(",")]
        if len({name.strip() for name, _, _ in pairs}) == len(pairs) and all(
            name.strip() and number.strip().isdecimal() for name, _, number in pairs
        ):
            return {name.strip(): int(number) for name, _, number in pairs}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{setting.flag} must be a {setting.kind.value}, not {text!r}.")
    return value


def _list(option: str, values: list[str]) -> list[str] | None:
    """Several values; a JSON list of them counts as its entries, as in vLLM."""
    taken: list[str] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError:  # its text is not repeated: it may be a key
            raise typer.BadParameter(f"{option}: begins with '[' and is no JSON list.") from None
        taken += [json.dumps(one) if isinstance(one, dict) else str(one) for one in parsed]
    return taken or None


def serve(context: typer.Context, **given: Any) -> None:
    """Serve OpenAI's API over HTTP.

    Every option may also be a QUIRE_* variable (--max-num-seqs is
    QUIRE_MAX_NUM_SEQS), or stand in a YAML file (--config). Flags come before
    variables, and variables before the file. An option that takes several
    values may be repeated, or take them one after the other. Nothing is sent
    anywhere: there are no usage statistics.
    """
    # MODEL comes before a variable or a file, as other flags do.
    words, model = given["words"], given["model"]
    is_flag = getattr(context.get_parameter_source("model"), "name", "") == "COMMANDLINE"
    if is_flag and words is not None and words != model:
        raise typer.BadParameter(f"MODEL is {words!r} and --model {model!r}: give one of them.")
    _check_environment()
    of_vllm = _of_vllm(context.meta[_OF_VLLM])
    wanted: dict[Target, dict[str, Any]] = {target: {} for target in Target}
    for setting in settings():
        value = _value(setting, given[setting.name])
        if value is not None:
            wanted[setting.target][setting.destination] = tuple(value) if _is_tuple(setting) else value
    task = wanted[Target.TASK]
    access_log = not task.pop("disable_access_log", False)
    further = {name: value.lower() if "log_" in name else value for name, value in task.items()}
    configure(further.get("log_format") == "json", further.get("log_level", "info"), further.get("uvicorn_log_level"))
    # Process 1 of a container would ignore SIGTERM. The server has handlers of its own for both, once it runs.
    with errors_in_one_line(), ended_by({signal.SIGINT: INTERRUPTED, signal.SIGTERM: 0}):
        logger.info("loading %s", words or model or "the bundled model")
        from quire.server import launch as command  # which takes seconds

        engine = {**wanted[Target.ENGINE], "model": words or model}
        code = command.serve(
            command.Task(engine, wanted[Target.SERVER], access_log=access_log, vllm=of_vllm, **further)
        )
    raise typer.Exit(code)


def _is_tuple(setting: Setting) -> bool:
    """ServerConfig, which is frozen, has its lists as tuples."""
    return setting.kind is Kind.TEXTS and setting.target is Target.SERVER


def _signature() -> inspect.Signature:
    """What typer reads the options from: one parameter for each setting."""
    model = typer.Argument(metavar="MODEL", help="A directory or hub id.", show_default="the bundled model")
    config = typer.Option("--config", help="A YAML file.", envvar="QUIRE_CONFIG", callback=_read_config, is_eager=True)
    annotated = {
        "context": typer.Context,
        "words": Annotated[_TEXT, model],
        "config": Annotated[_TEXT, config],
        **{one.name: Annotated[_TYPES.get(one.kind, _TEXT), _option(one)] for one in settings()},
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                name, kind, annotation=hint, default=inspect.Parameter.empty if name == "context" else None
            )
            for name, hint in annotated.items()
        ]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__annotations__ = {name: one.annotation for name, one in _signature().parameters.items()}
