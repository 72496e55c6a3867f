"""`quire bench`: output tokens per second, beside transformers' generate on the same requests."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.options import Dtype, Int, Json, Text
from quire.cli.terminal import console, ended_by_ctrl_c, errors_in_one_line, note

if TYPE_CHECKING:
    from quire.cli.contest import Report


class Case(StrEnum):
    """What `quire bench` measures."""

    single = "single"
    batch = "batch"
    all = "all"


def bench(
    model: Annotated[Text, typer.Argument(help="A directory or hub id.", show_default="the bundled model")] = None,
    case: Annotated[Case, typer.Option(help="One request, a batch, or both.")] = Case.all,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each engine gets; medians are shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and lengths.")] = 0,
    dtype: Dtype = None,
    block_size: Annotated[Int, typer.Option(help="Tokens in a KV block.", show_default="quire's")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Measure transformers' generate too.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Measure output tokens per second, beside transformers.

    Both have the same requests, on the same machine, in turns.
    """
    with errors_in_one_line():
        with ended_by_ctrl_c():
            note(f"loading {model or 'the bundled model'} ...")
            from quire.cli import contest, workload  # which takes seconds

        plan = workload.cases(case.value, requests, seed)
        report = contest.measure(model, plan, rounds, dtype, block_size, transformers)
        _show(report, as_json)


def _show(report: Report, as_json: bool) -> None:
    """Print a report."""
    if as_json:
        lines = [
            {**asdict(line), "out_tok_s": line.rate, "ratio_to_transformers": report.ratio(line)}
            for line in report.lines
        ]
        print(json.dumps({**asdict(report), "lines": lines}, indent=2))
        return
    from rich.table import Table

    table = Table("engine", "case", "out tok/s", "range", "ratio", "waste", "preempted")
    for line in report.lines:
        ratio, waste = report.ratio(line), line.turns[0].waste
        rates = [turn.rate for turn in line.turns]
        table.add_row(
            line.engine,
            line.case,
            f"{line.rate:.1f}",
            f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else "",
            "" if ratio is None else f"{ratio:.2f}",
            "" if waste is None else f"{100 * waste:.1f} %",
            "" if waste is None else str(sum(turn.preemptions or 0 for turn in line.turns)),
        )
    out = console()
    out.print(table)
    out.print(
        f"{report.model}, {report.dtype}, {report.threads} threads; KV pool: {report.pool_blocks} blocks of "
        f"{report.block_size} tokens, {report.pool_bytes / 1e6:.0f} MB; "
        f"medians of {len(report.lines[0].turns)} turns. "
        "ratio: to transformers; waste: mean share of allocated KV slots without a token.",
        markup=False,
    )
