"""`quire complete`: a server's model continues a text."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import (
    SERVER,
    Address,
    Key,
    ModelName,
    Seed,
    Temperature,
    Text,
    TopP,
    Url,
    Verbose,
    given,
    one_of,
)
from quire.cli.prompts import text_or_stdin
from quire.cli.terminal import errors_in_one_line, note


def complete(
    address: Address = None,
    prompt: Annotated[Text, typer.Argument(metavar="PROMPT", help='To be continued; "-": standard input.')] = None,
    url: Url = None,
    model_name: ModelName = None,
    quick: Annotated[Text, typer.Option("--quick", "-q", metavar="TEXT", help="The same as PROMPT.")] = None,
    api_key: Key = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Let a server's model continue a text.

    The server may be quire's, or any of OpenAI's API.

    URL may be short: localhost:8000 is http://localhost:8000/v1. Without a
    prompt, standard input is read; on a terminal, prompts are asked for.
    """
    params = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with errors_in_one_line():
        place = one_of("URL", address, "--url", url) or SERVER
        text = text_or_stdin(one_of("PROMPT", prompt, "--quick", quick))
        note(f"connecting to {place} ...")
        from quire.cli import remote  # which takes a second

        remote.complete(remote.Server(place, model_name, api_key, params), text, verbose)
