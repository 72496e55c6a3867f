"""`quire run`: answer a prompt, or hold a conversation, with a model of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import Dtype, Flag, Images, Int, Seed, Text, Verbose
from quire.cli.terminal import ended_by_ctrl_c, errors_in_one_line, note


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT]", help="A directory or hub id; the prompt. See above."),
    ] = None,
    image: Images = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", help="A LoRA adapter: a folder, or french or shout of the bundled model. See above."),
    ] = None,
    chat: Annotated[Flag, typer.Option("--chat/--no-chat", help="Hold a conversation.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt; apply no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0: from all.")] = 0,
    seed: Seed = None,
    dtype: Dtype = None,
    max_model_len: Annotated[
        Int, typer.Option(help="Most tokens of prompt and answer.", show_default="the model's")
    ] = None,
    revision: Annotated[Text, typer.Option(help="The hub's branch, tag or commit.")] = None,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, or hold a conversation, on the terminal.

    One argument is the prompt, for the bundled model; of two, the first names
    the model. Without a prompt, or with "-" for it, standard input is read;
    on a terminal, a conversation begins.

    With --chat, one argument names the model. Ctrl-C stops an answer, /help
    lists what else can be said, /exit or Ctrl-D leaves.

    A model that has a chat template is asked the prompt. One that has none
    continues it, and so does every model with --raw. Pictures come before the
    prompt, or, with --raw, where the prompt has the model's image token.

    With several --lora, each adapter is asked in turn; "base" asks the model
    without any.
    """
    from quire.cli.task import Task  # which knows the bundled models' names

    if chat and raw:
        raise typer.BadParameter("--chat and --raw exclude each other: a conversation needs a template.")
    with errors_in_one_line():
        task = Task.from_words(words or [], chat, raw, image or [], lora or [])
        with ended_by_ctrl_c():
            note(f"loading {task.model or 'the bundled model'} ...")
            from quire.cli import local  # which takes seconds

        local.run(
            task,
            dict(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens),
            dict(dtype=dtype, max_model_len=max_model_len, revision=revision),
            verbose,
        )
