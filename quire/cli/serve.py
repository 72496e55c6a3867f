"""`quire serve`: flags, QUIRE_* variables and a YAML file, in this order of precedence, for the settings of the table.

Names are vLLM's wherever both have the thing.
"""

from __future__ import annotations

import inspect
import json
import logging
import signal
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from quire.cli.serve_options import meaning, option, option_type, shown
from quire.cli.serve_sources import OF_VLLM, check_environment, read_config
from quire.cli.serve_words import Words
from quire.cli.terminal import INTERRUPTED, ended_by, errors_in_one_line
from quire.config import LaunchConfig
from quire.config.from_vllm import check
from quire.config.setting import Group
from quire.config.settings import at, make
from quire.errors import QuireError
from quire.garbage import collector_waits
from quire.server.logs import configure

logger = logging.getLogger("quire.server")

_SETTINGS = at("serve")
_Text: Any = str | None


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
        ctx.meta[OF_VLLM] = {}
        left = super().parse_args(ctx, taken)
        ctx.meta[OF_VLLM].update(words.of_vllm)  # after the file's
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Arguments"):
            formatter.write_dl([("[MODEL]", "A directory or hub id; the bundled model if there is none.")])
        for group in Group:
            lines = [shown(setting) for setting in _SETTINGS if setting.group is group]
            if lines:
                with formatter.section(group):
                    formatter.write_dl(lines)
        with formatter.section("Other"):
            formatter.write_dl(
                [
                    ("--config FILE", "A YAML file of these options, by their names."),
                    ("-h, --help", "Show this and leave."),
                ]
            )


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
    check_environment()
    of_vllm = _of_vllm(context.meta[OF_VLLM])
    values = {setting.name: meaning(setting, given[setting.name]) for setting in _SETTINGS}
    wanted = {name: value for name, value in {**values, "model": words or model}.items() if value is not None}
    launch = make(LaunchConfig, wanted)
    configure(launch.log_format == "json", launch.log_level, launch.uvicorn_log_level)
    # Process 1 of a container would ignore SIGTERM. The server has handlers of its own for both, once it runs.
    with errors_in_one_line(), ended_by({signal.SIGINT: INTERRUPTED, signal.SIGTERM: 0}):
        logger.info("loading %s", words or model or "the bundled model")
        with collector_waits():
            from quire.server import launch as command  # which takes seconds

        code = command.serve(command.Task(wanted, of_vllm))
    raise typer.Exit(code)


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


def _signature() -> inspect.Signature:
    """What typer reads the options from: one parameter for each setting."""
    model = typer.Argument(metavar="MODEL", help="A directory or hub id.", show_default="the bundled model")
    config = typer.Option("--config", help="A YAML file.", envvar="QUIRE_CONFIG", callback=read_config, is_eager=True)
    annotated = {
        "words": Annotated[_Text, model],
        "config": Annotated[_Text, config],
        **{one.name: Annotated[option_type(one), option(one)] for one in _SETTINGS},
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", kind, annotation=typer.Context)
    return inspect.Signature(
        [context, *(inspect.Parameter(name, kind, annotation=hint, default=None) for name, hint in annotated.items())]
    )


_SIGNATURE = _signature()
serve.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
serve.__annotations__ = {name: one.annotation for name, one in _SIGNATURE.parameters.items()}
