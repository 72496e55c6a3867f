"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quire.errors import QuireError

Text = str | None
Int = int | None
Float = float | None
Flag = bool | None

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[
    Text, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.", show_default="auto")
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", "-i", help="A picture that the prompt is about: a file or a URL. May be repeated."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Report speed, even to a pipe.")]
Seed = Annotated[Int, typer.Option(help="Same seed, same draws.", show_default="random")]

# Of `chat` and `complete`; names as vLLM's commands of the same names have them.
SERVER = "localhost:8000"  # where `quire serve` listens
Address = Annotated[Text, typer.Argument(metavar="URL", help="The server.", show_default=SERVER)]
Url = Annotated[Text, typer.Option("--url", help="The same as URL.")]
ModelName = Annotated[
    Text,
    typer.Option("--model-name", "--model", help="Which of its models or adapters.", show_default="the first"),
]
Key = Annotated[Text, typer.Option("--api-key", help="Its key.", show_default="OPENAI_API_KEY")]
MaxTokens = Annotated[Int, typer.Option(help="Most tokens of an answer.", show_default="the server's")]
Temperature = Annotated[Float, typer.Option(help="0 takes the likeliest token each time.", show_default="the server's")]
TopP = Annotated[Float, typer.Option(help="Draw from the likeliest tokens of this mass.", show_default="the server's")]


def given(**params: Any) -> dict[str, Any]:
    """What the user has set; the rest is the server's to choose."""
    return {name: value for name, value in params.items() if value is not None}


def one_of(name: str, value: str | None, other: str, same: str | None) -> str | None:
    """What may be given in two ways. Raises QuireError where both were taken and differ."""
    if value is not None and same is not None and value != same:
        raise QuireError(f"{name} is {value!r} and {other} {same!r}: give one of them.")
    return value if value is not None else same
