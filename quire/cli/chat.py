"""`quire chat`: a conversation with a server's model."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import (
    SERVER,
    Address,
    Images,
    Key,
    MaxTokens,
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
from quire.cli.terminal import errors_in_one_line, note


def chat(
    address: Address = None,
    prompt: Annotated[Text, typer.Argument(metavar="PROMPT", help="What to say first.")] = None,
    url: Url = None,
    model_name: ModelName = None,
    system_prompt: Annotated[Text, typer.Option(help="Tells the model how to answer.")] = None,
    image: Images = None,
    quick: Annotated[Text, typer.Option("--quick", "-q", metavar="TEXT", help="Say this, and end.")] = None,
    api_key: Key = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    verbose: Verbose = False,
) -> None:
    """Hold a conversation with a server's model.

    The server may be quire's, or any of OpenAI's API.

    URL may be short: localhost:8000 is http://localhost:8000/v1. /help lists
    what can be said to the program, /lora NAME takes another model of the
    server's. Ctrl-C stops an answer, /exit or Ctrl-D leaves.
    """
    params = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with errors_in_one_line():
        place = one_of("URL", address, "--url", url) or SERVER
        first = one_of("PROMPT", prompt, "--quick", quick)
        note(f"connecting to {place} ...")
        from quire.cli import remote  # which takes a second

        server = remote.Server(place, model_name, api_key, params)
        remote.chat(server, first, quick is not None, system_prompt, image or [], verbose)
