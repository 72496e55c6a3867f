"""`quire serve`: flags, QUIRE_* variables and a YAML file, in this order of precedence, for the settings of the table.

Names are vLLM's wherever both have the thing.
"""

from __future__ import annotations

import logging
import signal
from typing import Annotated, Any, ClassVar

import typer

from quire.cli.settings_command import SettingsCommand, read_settings, take_settings
from quire.cli.terminal import INTERRUPTED, ended_by, errors_in_one_line
from quire.config import LaunchConfig
from quire.config.settings import at, make
from quire.garbage import collector_waits
from quire.server.logs import configure

logger = logging.getLogger("quire.server")

_SETTINGS = at("serve")
_Text: Any = str | None


class ServeCommand(SettingsCommand):
    settings = _SETTINGS
    others: ClassVar = {"Arguments": [("[MODEL]", "A directory or hub id; the bundled model if there is none.")]}


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
    wanted, of_vllm = read_settings(context, _SETTINGS, {**given, "model": words or model})
    launch = make(LaunchConfig, wanted)
    configure(launch.log_format == "json", launch.log_level, launch.uvicorn_log_level)
    # Process 1 of a container would ignore SIGTERM. The server has handlers of its own for both, once it runs.
    with errors_in_one_line(), ended_by({signal.SIGINT: INTERRUPTED, signal.SIGTERM: 0}):
        logger.info("loading %s", words or model or "the bundled model")
        with collector_waits():
            from quire.server import launch as command  # which takes seconds

        code = command.serve(command.Task(wanted, of_vllm))
    raise typer.Exit(code)


_MODEL = typer.Argument(metavar="MODEL", help="A directory or hub id.", show_default="the bundled model")
take_settings(serve, _SETTINGS, {"words": Annotated[_Text, _MODEL]})
