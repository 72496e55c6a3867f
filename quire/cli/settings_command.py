"""A command whose options are settings of the table: read as vLLM's parser reads them, shown in groups."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from quire.cli.serve_options import meaning, option, option_type, shown
from quire.cli.serve_sources import OF_VLLM, check_environment, read_config
from quire.cli.serve_words import Words
from quire.config.from_vllm import check
from quire.config.setting import Group, Setting
from quire.errors import QuireError


class SettingsCommand(TyperCommand):
    """Takes what vLLM's parser takes beside click's, and shows its options in groups, each name whole.

    Of a class derived from it: settings, its options; others, the lines of help about what else it takes; words, who
    reads its command line.
    """

    settings: ClassVar[Sequence[Setting]] = ()
    others: ClassVar[Mapping[str, Sequence[tuple[str, str]]]] = {}
    words: ClassVar[type[Words]] = Words

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rich_markup_mode = None  # whose tables cut long names

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = self.words(self.params)
        try:
            taken = words.as_click_takes_them(args)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        ctx.meta[OF_VLLM] = {}
        left = super().parse_args(ctx, taken)
        ctx.meta[OF_VLLM].update(words.of_vllm)  # after the file's
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, lines in self.others.items():
            with formatter.section(title):
                formatter.write_dl(list(lines))
        for group in Group:
            rows = [shown(setting) for setting in self.settings if setting.group is group]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)
        with formatter.section("Other"):
            formatter.write_dl(
                [
                    ("--config FILE", "A YAML file of these options, by their names."),
                    ("-h, --help", "Show this and leave."),
                ]
            )


def take_settings(command: Callable[..., None], settings: Sequence[Setting], before: Mapping[str, Any]) -> None:
    """Give a command, which takes all by name, the signature that typer reads options from: one parameter for each
    setting. before: its other parameters, by name, with what typer says of each.
    """
    config = typer.Option("--config", help="A YAML file.", envvar="QUIRE_CONFIG", callback=read_config, is_eager=True)
    annotated: dict[str, Any] = {
        **before,
        "config": Annotated[str | None, config],
        **{one.name: Annotated[option_type(one), option(one)] for one in settings},
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", kind, annotation=typer.Context)
    signature = inspect.Signature(
        [context, *(inspect.Parameter(name, kind, annotation=hint, default=None) for name, hint in annotated.items())]
    )
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}


def read_settings(
    context: typer.Context, settings: Sequence[Setting], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings by name, options of vLLM's that quire does not have), of what was given. Raises BadParameter."""
    check_environment()
    of_vllm = _of_vllm(context.meta[OF_VLLM])
    values = {setting.name: meaning(setting, given[setting.name]) for setting in settings}
    return {name: value for name, value in values.items() if value is not None}, of_vllm


def _of_vllm(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of vLLM's that were given, each checked. Raises BadParameter for one that is refused."""
    wanted = {name: value for name, value in ((name, _plain(one)) for name, one in given.items()) if value is not None}
    for name, value in wanted.items():
        try:
            check("serve", name, value)
        except QuireError as error:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: {error}") from None
    return wanted


def _plain(given: Any) -> Any:
    """What a word means: a number, a JSON value, None, or itself."""
    if not isinstance(given, str):
        return given
    if given in ("", "None", "null"):
        return None
    try:
        return json.loads(given)
    except ValueError:
        return given
