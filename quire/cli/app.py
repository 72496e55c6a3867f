"""The command `quire`. A command's imports stand inside it: `quire --help` must not wait for torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire import __version__
from quire.cli.serve import ServeCommand, serve
from quire.cli.terminal import ended_by_ctrl_c, errors_in_one_line, note, usable_streams


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

_Text = str | None
_Int = int | None
_Float = float | None
_Flag = bool | None

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Dtype = Annotated[
    _Text, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.", show_default="auto")
]
_Images = Annotated[
    list[str] | None,
    typer.Option("--image", "-i", help="A picture that the prompt is about: a file or a URL. May be repeated."),
]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Report speed, even to a pipe.")]

# Of `chat` and `complete`; names as vLLM's commands of the same names have them.
_SERVER = "localhost:8000"  # where `quire serve` listens
_Address = Annotated[_Text, typer.Argument(metavar="URL", help="The server.", show_default=_SERVER)]
_Url = Annotated[_Text, typer.Option("--url", help="The same as URL.")]
_Model = Annotated[
    _Text,
    typer.Option("--model-name", "--model", help="Which of its models or adapters.", show_default="the first"),
]
_Key = Annotated[_Text, typer.Option("--api-key", help="Its key.", show_default="OPENAI_API_KEY")]
_Most = Annotated[_Int, typer.Option(help="Most tokens of an answer.", show_default="the server's")]
_Temperature = Annotated[
    _Float, typer.Option(help="0 takes the likeliest token each time.", show_default="the server's")
]
_TopP = Annotated[
    _Float, typer.Option(help="Draw from the likeliest tokens of this mass.", show_default="the server's")
]
_Seed = Annotated[_Int, typer.Option(help="Same seed, same draws.", show_default="random")]


class Case(StrEnum):
    """What `quire bench` measures."""

    single = "single"
    batch = "batch"
    all = "all"


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


@app.command()
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT]", help="A directory or hub id; the prompt. See above."),
    ] = None,
    image: _Images = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", help="A LoRA adapter: a folder, or french or shout of the bundled model. See above."),
    ] = None,
    chat: Annotated[_Flag, typer.Option("--chat/--no-chat", help="Hold a conversation.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt; apply no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0: from all.")] = 0,
    seed: _Seed = None,
    dtype: _Dtype = None,
    max_model_len: Annotated[
        _Int, typer.Option(help="Most tokens of prompt and answer.", show_default="the model's")
    ] = None,
    revision: Annotated[_Text, typer.Option(help="The hub's branch, tag or commit.")] = None,
    verbose: _Verbose = False,
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
    from quire.cli.asked import Task

    if chat and raw:
        raise typer.BadParameter("--chat and --raw exclude each other: a conversation needs a template.")
    with errors_in_one_line():
        task = Task.from_words(words or [], chat, raw, image or [], lora or [])
        with ended_by_ctrl_c():
            note(f"loading {task.model or 'the bundled model'} ...")
            from quire.cli import run as command

        command.run(
            task,
            dict(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens),
            dict(dtype=dtype, max_model_len=max_model_len, revision=revision),
            verbose,
        )


app.command(cls=ServeCommand)(serve)


@app.command()
def chat(
    address: _Address = None,
    prompt: Annotated[_Text, typer.Argument(metavar="PROMPT", help="What to say first.")] = None,
    url: _Url = None,
    model_name: _Model = None,
    system_prompt: Annotated[_Text, typer.Option(help="Tells the model how to answer.")] = None,
    image: _Images = None,
    quick: Annotated[_Text, typer.Option("--quick", "-q", metavar="TEXT", help="Say this, and end.")] = None,
    api_key: _Key = None,
    max_tokens: _Most = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    verbose: _Verbose = False,
) -> None:
    """Hold a conversation with a server's model.

    The server may be quire's, or any of OpenAI's API.

    URL may be short: localhost:8000 is http://localhost:8000/v1. /help lists
    what can be said to the program, /lora NAME takes another model of the
    server's. Ctrl-C stops an answer, /exit or Ctrl-D leaves.
    """
    from quire.cli.asked import one_of

    params = dict(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with errors_in_one_line():
        place = one_of("URL", address, "--url", url) or _SERVER
        first = one_of("PROMPT", prompt, "--quick", quick)
        note(f"connecting to {place} ...")
        from quire.cli import remote

        server = remote.Server(place, model_name, api_key, _given(params))
        remote.chat(server, first, quick is not None, system_prompt, image or [], verbose)


@app.command()
def complete(
    address: _Address = None,
    prompt: Annotated[_Text, typer.Argument(metavar="PROMPT", help='To be continued; "-": standard input.')] = None,
    url: _Url = None,
    model_name: _Model = None,
    quick: Annotated[_Text, typer.Option("--quick", "-q", metavar="TEXT", help="The same as PROMPT.")] = None,
    api_key: _Key = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    verbose: _Verbose = False,
) -> None:
    """Let a server's model continue a text.

    The server may be quire's, or any of OpenAI's API.

    URL may be short: localhost:8000 is http://localhost:8000/v1. Without a
    prompt, standard input is read; on a terminal, prompts are asked for.
    """
    from quire.cli.asked import one_of, text_or_stdin

    params = dict(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with errors_in_one_line():
        place = one_of("URL", address, "--url", url) or _SERVER
        text = text_or_stdin(one_of("PROMPT", prompt, "--quick", quick))
        note(f"connecting to {place} ...")
        from quire.cli import remote

        remote.complete(remote.Server(place, model_name, api_key, _given(params)), text, verbose)


def _given(params: dict[str, Any]) -> dict[str, Any]:
    """What the user has set; the rest is the server's to choose."""
    return {name: value for name, value in params.items() if value is not None}


@app.command()
def models(as_json: _Json = False) -> None:
    """List the architectures that quire serves, with plug-ins'."""
    from quire.cli import models as command

    with errors_in_one_line():
        command.show(as_json)


@app.command()
def doctor(as_json: _Json = False) -> None:
    """Say what quire runs on, and what is missing.

    Each thing that is missing comes with the way to get it. Exit code 1: quire
    cannot run.
    """
    from quire.cli import doctor as command

    if not command.show(as_json):
        raise typer.Exit(1)


@app.command()
def bench(
    model: Annotated[_Text, typer.Argument(help="A directory or hub id.", show_default="the bundled model")] = None,
    case: Annotated[Case, typer.Option(help="One request, a batch, or both.")] = Case.all,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each engine gets; medians are shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and lengths.")] = 0,
    dtype: _Dtype = None,
    block_size: Annotated[_Int, typer.Option(help="Tokens in a KV block.", show_default="quire's")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Measure transformers' generate too.")
    ] = True,
    as_json: _Json = False,
) -> None:
    """Measure output tokens per second, beside transformers.

    Both have the same requests, on the same machine, in turns.
    """
    with errors_in_one_line():
        with ended_by_ctrl_c():
            note(f"loading {model or 'the bundled model'} ...")
            from quire.cli import bench as command

        cases = command.cases(case.value, requests, seed)
        report = command.measure(model, cases, rounds, dtype, block_size, transformers)
        command.show(report, as_json)
