"""`quire run-batch`: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import logging
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from quire.cli.address import api_url
from quire.cli.options import one_of
from quire.cli.serve_words import Words
from quire.cli.settings_command import SettingsCommand, read_settings, take_settings
from quire.cli.terminal import INTERRUPTED, ended_by, errors_in_one_line, print_error
from quire.config import LaunchConfig, ServerConfig
from quire.config.settings import at, make
from quire.errors import QuireError
from quire.garbage import collector_waits
from quire.server.logs import configure

if TYPE_CHECKING:
    from quire.server.batch.answers import AnswerFile
    from quire.server.batch.command import Outcome
    from quire.server.batch.plan import Plan
    from quire.server.batch.run import Tally

logger = logging.getLogger("quire.server")

CONCURRENCY = 256
ERRORS = 3  # the exit code where all is answered, and some answers are errors
_TERMINATED = 143  # of a program that SIGTERM ended, as shells have it
_EVERY = 30.0  # seconds between two lines about progress, where no bar is seen

# Of the server's settings those that are about connections, keys and lines for each request.
_OF_A_SERVER = {
    "host", "port", "uds", "root_path", "page", "ssl_keyfile", "ssl_certfile", "api_key", "admin_api_key",
    "enable_admin_routes", "allowed_origins", "header_timeout", "body_timeout", "timeout_keep_alive", "send_timeout",
    "max_connections", "unload_timeout", "shutdown_timeout", "step_timeout", "uvicorn_log_level",
    "disable_access_log", "log_probes", "metrics_prefix",
}  # fmt: skip
_OF_FILES = {"max_request_bytes", "log_level", "log_format"}  # and not of the engine
_SETTINGS = tuple(setting for setting in at("serve") if setting.name not in _OF_A_SERVER)


class _BatchWords(Words):
    def _part_model(self) -> None:
        """No word of a batch's command line is a model."""


class RunBatchCommand(SettingsCommand):
    settings = _SETTINGS
    words = _BatchWords
    others: ClassVar = {
        "Arguments": [
            ("IN", "The requests: one JSON object a line. Or -i, --input-file."),
            ("OUT", "Their answers. Or -o, --output-file."),
        ],
        "By a server that runs, instead of an engine of its own": [
            ("--url TEXT", "The server, or the door of replicas, that answers the requests."),
            ("--api-key TEXT", "Its key. [QUIRE_API_KEY, or OPENAI_API_KEY]"),
            ("--max-concurrency N", f"Requests in flight at once. [{CONCURRENCY}]"),
        ],
    }


def run_batch(context: typer.Context, **given: Any) -> None:
    """Answer a file of requests, as OpenAI's batch API does.

    Each line of IN has custom_id, method, url and body; each line of OUT its
    custom_id and the answer, in the order in which they are ready. An OUT
    that is there already is gone on with: what it answers is left out. IN is
    checked before anything is loaded: nothing begins while a line is no
    request, or a custom_id is there twice.

    With --url, a server that runs answers, or the door of replicas.

    Exit codes: 0, all is answered; 3, some of the answers are errors; 1, it
    could not be run to its end; 130, Ctrl-C.
    """
    with errors_in_one_line():
        requests = one_of("IN", given["input"], "--input-file", given["input_file"])
        answers = one_of("OUT", given["output"], "--output-file", given["output_file"])
    if requests is None or answers is None:
        raise typer.BadParameter("give two files: quire run-batch IN.jsonl OUT.jsonl.")
    wanted, of_vllm = read_settings(context, _SETTINGS, given)
    server = _server(context, given, of_vllm)
    launch = make(LaunchConfig, wanted)
    configure(launch.log_format == "json", launch.log_level)
    with errors_in_one_line(), ended_by({signal.SIGINT: INTERRUPTED, signal.SIGTERM: _TERMINATED}):
        code = _run(Path(requests), Path(answers), server, wanted, of_vllm)
    raise typer.Exit(code)


@dataclass(frozen=True)
class _Server:
    """That answers, in place of an engine. concurrency: requests in flight."""

    url: str
    key: str | None
    concurrency: int


def _server(context: typer.Context, given: dict[str, Any], of_vllm: dict[str, Any]) -> _Server | None:
    """Raises BadParameter for options that only the other way has: nobody would do as they say."""
    chosen = {name for name in given if _is_chosen(context, name)}
    if given["url"] is None:
        if of_server := chosen & {"api_key", "max_concurrency"}:
            raise typer.BadParameter(f"{_flag(min(of_server))} is for a server that runs: name it (--url).")
        return None
    of_engine = [one.name for one in _SETTINGS if one.name in chosen and one.name not in _OF_FILES]
    if of_engine := of_engine or list(of_vllm):
        raise typer.BadParameter(f"{_flag(of_engine[0])} is for an engine, and with --url the server has its own.")
    concurrency = CONCURRENCY if given["max_concurrency"] is None else given["max_concurrency"]
    if concurrency < 1:
        raise typer.BadParameter(f"--max-concurrency {concurrency}: must be 1 at least.")
    url = api_url(given["url"])
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise typer.BadParameter("--url has a name or a password in it: give the key by --api-key, or QUIRE_API_KEY.")
    return _Server(url, given["api_key"], concurrency)


def _is_chosen(context: typer.Context, name: str) -> bool:
    """Whether it was said for this command: variables are for all commands."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run(requests: Path, answers: Path, server: _Server | None, wanted: dict[str, Any], of_vllm: dict[str, Any]) -> int:
    from quire.server.batch.answers import AnswerFile  # numpy comes with the plan
    from quire.server.batch.plan import make_plan

    if answers.exists() and requests.exists() and answers.samefile(requests):
        raise QuireError(f"{answers}: is the file of the requests: give another one for the answers.")
    with AnswerFile(answers) as file:
        answered = file.read()
        plan = make_plan(requests, answered, make(ServerConfig, wanted).max_request_bytes)
        if plan.strangers:
            logger.warning("%d answers in %s are to no request of %s; they stay", plan.strangers, answers, requests)
        logger.info("%d requests, %d of them answered before", plan.total, plan.answered)
        if plan.answered == plan.total:
            return ERRORS if answered.failed else 0
        outcome = _loaded(plan, file, wanted, of_vllm) if server is None else _sent(server, plan, file)
    return _told(outcome, plan, answered.failed)


def _loaded(plan: Plan, file: AnswerFile, wanted: dict[str, Any], of_vllm: dict[str, Any]) -> Outcome:
    """By an engine in this process."""
    logger.info("loading %s", wanted.get("model") or "the bundled model")
    with collector_waits():
        from quire.server.batch import in_process  # which takes seconds
        from quire.server.launch import Task

    with _Progress(plan) as progress:
        task = Task({**wanted, "disable_access_log": True}, of_vllm)
        return in_process.run_batch(task, plan, file, progress.show)


def _sent(server: _Server, plan: Plan, file: AnswerFile) -> Outcome:
    """By a server."""
    logger.info("asking %s", server.url)
    with collector_waits():
        from quire.server.batch import remote

    with _Progress(plan) as progress:
        return remote.run_batch(server.url, server.key, server.concurrency, plan, file, progress.show)


class _Progress:
    """A bar for who sits at a terminal, and a line now and then for a log."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._next = time.monotonic() + _EVERY

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        hidden = not sys.stderr.isatty()
        self._bar = tqdm(total=self._plan.total, initial=self._plan.answered, unit="request", disable=hidden)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, tally: Tally) -> None:
        self._bar.update()
        if self._bar.disable and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            logger.info("%d of %d requests are answered", self._plan.answered + tally.answers, self._plan.total)


def _told(outcome: Outcome, plan: Plan, failed_before: int) -> int:
    """Say how it ended. Returns the exit code."""
    tally = outcome.tally
    statuses = ", ".join(f"{count} with {status}" for status, count in sorted(tally.statuses.items()))
    rate = tally.output_tokens / outcome.seconds if outcome.seconds else 0.0
    typer.echo(
        f"{plan.answered + tally.answers} of {plan.total} requests are answered; in this run {tally.answers}"
        f"{f' ({statuses})' if statuses else ''} in {outcome.seconds:.1f} s: {tally.prompt_tokens} prompt tokens, "
        f"{tally.output_tokens} generated, {rate:.0f} a second",
        err=True,
    )
    if outcome.error is not None:
        print_error(f"{outcome.error}. The same command goes on with the rest.")
        return 1
    if outcome.signal is not None:
        typer.echo("stopped: the same command goes on with the rest", err=True)
        return INTERRUPTED if outcome.signal == signal.SIGINT else _TERMINATED
    return ERRORS if tally.failed or failed_before else 0


_Text: Any = str | None


def _file(flags: tuple[str, str], text: str) -> Any:
    return Annotated[_Text, typer.Option(*flags, metavar="FILE", help=text)]


take_settings(
    run_batch,
    _SETTINGS,
    {
        "input": Annotated[_Text, typer.Argument(metavar="IN", help="The requests.")],
        "output": Annotated[_Text, typer.Argument(metavar="OUT", help="Their answers.")],
        "input_file": _file(("--input-file", "-i"), "The same as IN."),
        "output_file": _file(("--output-file", "-o"), "The same as OUT."),
        "url": Annotated[_Text, typer.Option("--url")],
        "api_key": Annotated[_Text, typer.Option("--api-key", envvar=["QUIRE_API_KEY", "OPENAI_API_KEY"])],
        "max_concurrency": Annotated[int | None, typer.Option("--max-concurrency")],
    },
)
