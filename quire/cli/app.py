"""The command `quire`. What a command needs is imported inside it: `quire --help` must not wait for torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire import __version__
from quire.cli.bench import bench
from quire.cli.chat import chat
from quire.cli.complete import complete
from quire.cli.deploy import DeployCommand, deploy
from quire.cli.doctor import doctor
from quire.cli.models import models
from quire.cli.quantize import quantize
from quire.cli.run import run
from quire.cli.run_batch import RunBatchCommand, run_batch
from quire.cli.serve import ServeCommand, serve
from quire.cli.terminal import usable_streams
from quire.cli.top import top


class _Commands(TyperGroup):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        with usable_streams():
            return super().main(*args, **kwargs)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve Hugging Face language models and LoRA adapters on one block-managed KV cache.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(run)
app.command(cls=ServeCommand)(serve)
app.command(cls=DeployCommand)(deploy)
app.command("run-batch", cls=RunBatchCommand)(run_batch)
for verb in (chat, complete, top, models, doctor, bench, quantize):
    app.command()(verb)
