"""`quire deploy`: replicas of `quire serve` on a cluster of Ray's, from one file."""

from __future__ import annotations

import json
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


class DeployCommand(SettingsCommand):
    settings = _SETTINGS
    others: ClassVar = {
        "Arguments": [("CONFIG", "A YAML file: options of `quire serve` by name, and `deploy` (docs/replicas.md).")],
        "Deployment": [
            ("--deploy JSON", "What the file has as `deploy`: replicas, doors, name."),
            ("--address TEXT", "Ray's address of a cluster. [the one on this machine, or a new one]"),
            ("--detach", "Leave once requests are answered; `quire deploy --delete` ends the application."),
            ("--delete", "End the application of this file's name."),
        ],
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            args = ["--config", *args]
        return super().parse_args(ctx, args)


def deploy(context: typer.Context, **given: Any) -> None:
    """Serve one model by several replicas, on a cluster of Ray's.

    CONFIG is the file that `quire serve --config` takes, and has `deploy`
    beside it. One port answers as a single server does; adapters are loaded
    by all replicas or by none. It needs pip install 'quire-llm[ray]'.
    """
    wanted, of_vllm = read_settings(context, _SETTINGS, given)
    launch = make(LaunchConfig, wanted)
    configure(launch.log_format == "json", launch.log_level, launch.uvicorn_log_level)
    with errors_in_one_line(), ended_by({signal.SIGINT: INTERRUPTED, signal.SIGTERM: 0}):
        with collector_waits():
            from quire.distributed import deploy as command
            from quire.distributed.deployment import deployment

        plan = deployment(wanted, of_vllm, _read(given["deploy"]))
        command.connect(given["address"], stays=bool(given["delete"] or given["detach"]))
        if given["delete"]:
            return command.end(plan)
        logger.info("%s listens on %s", plan.name, command.start(plan))
        if given["detach"]:
            return
        with command.until_signal() as ended:
            try:
                command.watch(plan.name, ended)
            finally:
                command.end(plan)


def _read(given: str | None) -> Any:
    try:
        return None if given is None else json.loads(given)
    except ValueError:
        raise typer.BadParameter(f"--deploy must be JSON, not {given!r}.") from None


_OTHERS = {
    "deploy": Annotated[str | None, typer.Option("--deploy")],
    "address": Annotated[str | None, typer.Option("--address", envvar="RAY_ADDRESS")],
    "detach": Annotated[bool | None, typer.Option("--detach")],
    "delete": Annotated[bool | None, typer.Option("--delete")],
}
take_settings(deploy, _SETTINGS, _OTHERS)
