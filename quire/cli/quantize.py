"""`quire quantize`: a checkpoint with fewer bits, kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import Text
from quire.cli.terminal import ended_by_ctrl_c, errors_in_one_line, note
from quire.errors import QuireError


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory or hub id, of 16 or 32 bits.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which must not be there yet.")],
    quantization: Annotated[str, typer.Option("--quantization", "-q", help="int8 or int4.")] = "int8",
    revision: Annotated[Text, typer.Option(help="The hub's branch, tag or commit.")] = None,
) -> None:
    """Write a checkpoint with weights of 8 or 4 bits.

    The folder loads as any other, in a fraction of the time that making it
    takes, and gives the same bits as --quantization does while a model is
    loaded. It is there whole or not at all.
    """
    with errors_in_one_line(), ended_by_ctrl_c():
        note(f"reading {model} ...")
        _quantize(model, out.expanduser(), quantization, revision)


def _quantize(model: str, out: Path, name: str, revision: str | None) -> None:
    from quire.models.quantization import ON_THE_FLY

    if name not in ON_THE_FLY:
        raise QuireError(f"--quantization {name!r}: is {' or '.join(ON_THE_FLY)}.")
    from quire.checkpoint.files import resolve_weights
    from quire.cli.terminal import console
    from quire.models.quantization.keep import keep

    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth != shown:
            shown = tenth
            note(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    written = keep(resolve_weights(model, revision), out, name, report)
    share = written.after / max(written.before, 1)
    console().print(
        f"{out}: {written.after / 1e6:,.1f} MB of weights, {share:.0%} of {written.before / 1e6:,.1f} MB",
        markup=False,
        highlight=False,
    )
