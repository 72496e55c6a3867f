"""`quire run`: what it prints is what the engine answers, and what goes wrong is one line."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli.app import app
from quire.demo import adapter_path, picture_path

pytestmark = pytest.mark.slow

PROMPT = ">>> "
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def quire_run(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, args)], input=stdin)


def answered(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def continuation(model: Path, prompt: str) -> str:
    return LLM(str(model)).generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text


def reply(model: Path, *turns: str) -> str:
    """What the model says to turns that alternate between user and assistant."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return LLM(str(model)).chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_the_bundled_model_answers() -> None:
    assert "quire" in answered(quire_run("Who are you?"))


def test_the_bundled_model_reads_its_prompt_from_stdin() -> None:
    assert answered(quire_run(stdin="Who are you?\n")) == answered(quire_run("Who are you?"))


def test_a_model_without_template_continues_the_prompt(plain_model: Path) -> None:
    assert answered(quire_run(plain_model, "Once", "--max-tokens", 12)) == continuation(plain_model, "Once") + "\n"


def test_a_model_with_template_is_asked(chat_model: Path) -> None:
    assert answered(quire_run(chat_model, "Once", "--max-tokens", 12)) == reply(chat_model, "Once") + "\n"


def test_raw_applies_no_template(chat_model: Path) -> None:
    out = answered(quire_run(chat_model, "Once", "--max-tokens", 12, "--raw"))
    assert out == continuation(chat_model, "Once") + "\n"
    assert out != answered(quire_run(chat_model, "Once", "--max-tokens", 12))


def test_a_dash_reads_the_prompt_from_stdin(plain_model: Path) -> None:
    piped = quire_run(plain_model, "-", "--max-tokens", 12, stdin="Once\n")
    assert answered(piped) == answered(quire_run(plain_model, "Once", "--max-tokens", 12))


def test_a_seed_repeats_the_draws(plain_model: Path) -> None:
    def draw(seed: int) -> str:
        options = ("--temperature", 1, "--top-p", 0.95, "--top-k", 20, "--max-tokens", 30, "--seed", seed)
        return answered(quire_run(plain_model, "Once", *options))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_speed_is_reported_on_stderr_when_asked(plain_model: Path) -> None:
    quiet = quire_run(plain_model, "Once", "--max-tokens", 12)
    verbose = quire_run(plain_model, "Once", "--max-tokens", 12, "--verbose")
    assert quiet.stdout == verbose.stdout
    assert not quiet.stderr
    assert verbose.stderr.startswith("12 tokens, ")
    assert "first token after" in verbose.stderr


def test_a_conversation_remembers(chat_model: Path) -> None:
    result = quire_run("--chat", chat_model, "--max-tokens", 12, stdin="One\nTwo\n/clear\nTwo\n/exit\nNever\n")
    first = reply(chat_model, "One")
    second = reply(chat_model, "One", first, "Two")
    assert answered(result) == f"{first}\n{second}\n{reply(chat_model, 'Two')}\n"


def test_reset_is_clear_and_the_system_stays(chat_model: Path) -> None:
    lines = "/system Be brief.\nOne\n/reset\nTwo\n/system\n/reset\nTwo\n"
    result = quire_run("--chat", chat_model, "--max-tokens", 12, stdin=lines)
    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": t}] for t in ("One", "Two")]
    said = [out.outputs[0].text for out in LLM(str(chat_model)).chat(messages, GREEDY, use_tqdm=False)]
    assert answered(result) == f"{said[0]}\n{said[1]}\n{reply(chat_model, 'Two')}\n"


def test_two_slashes_send_one(chat_model: Path) -> None:
    result = quire_run("--chat", chat_model, "--max-tokens", 12, stdin="//etc/hosts\n")
    assert answered(result) == reply(chat_model, "/etc/hosts") + "\n"


def test_an_unknown_command_is_not_sent(chat_model: Path) -> None:
    result = quire_run("--chat", chat_model, "--max-tokens", 12, stdin="/etc/hosts\nOne\n")
    assert result.exit_code == 1 and not result.stdout
    assert "there is no command /etc/hosts: /help" in result.stderr and "//etc/hosts" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/lora", "There are base, a folder"),
        ("/lora /nowhere/x", "/nowhere/x"),
        ("/image", "/image FILE"),
        ("/image /nowhere.png", "/nowhere.png: No such file"),
        ("/image CONFIG", "is no picture"),
        ("/save /nowhere/x.txt", "No such file"),
        ("/reset all", "/reset takes nothing"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(chat_model: Path, line: str, message: str) -> None:
    lines = line.replace("CONFIG", str(chat_model / "config.json")) + "\n"
    result = quire_run("--chat", chat_model, stdin=lines)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and message in result.stderr


def test_help_lists_every_command(chat_model: Path) -> None:
    shown = quire_run("--chat", chat_model, stdin="/help\n/exit\n").stderr
    assert [line.split()[0] for line in shown.splitlines()] == [
        "/help", "/image", "/system", "/lora", "/reset", "/clear", "/save", "/exit", "//text",
    ]  # fmt: skip
    assert all(len(line) < 80 for line in shown.splitlines())


def test_a_conversation_is_saved(chat_model: Path, tmp_path: Path) -> None:
    as_text, as_json = tmp_path / "said.txt", tmp_path / "said.json"
    lines = f"One\n/save {as_json}\nTwo\n/save {as_json}\n/save {as_text}\n"
    first, second = answered(quire_run("--chat", chat_model, "--max-tokens", 12, stdin=lines)).splitlines()
    said = [("user", "One"), ("assistant", first), ("user", "Two"), ("assistant", second)]
    assert [(message["role"], message["content"]) for message in json.loads(as_json.read_text())] == said
    assert as_text.read_text() == "\n\n".join(f"{role}: {text}" for role, text in said) + "\n"
    again = quire_run("--chat", chat_model, stdin=f"/save {as_text}\n")
    assert again.exit_code == 1 and "there is such a file already" in again.stderr


def test_pictures_and_adapters_in_a_conversation() -> None:
    question = "What do you see?"
    lines = f"/image {picture_path()}\n{question}\n/lora shout\n/reset\n/image {picture_path()}\n{question}\n"
    plain, loud, again = answered(quire_run("--chat", stdin=f"{lines}/lora base\n{question}\n")).splitlines()
    assert "red circle" in plain and "RED CIRCLE" in loud and again != again.upper()


@pytest.mark.parametrize(("where", "name"), [(".", "."), ("beside", ".."), ("beside", "../../loud")])
def test_an_adapter_is_called_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    folder = Path(shutil.copytree(adapter_path("shout"), tmp_path / "loud"))
    (folder / "beside").mkdir()
    monkeypatch.chdir(folder / where)
    said = answered(quire_run("Who are you?", "--lora", name, "--lora", "base")).splitlines()
    assert said[0].startswith("loud: ") and said[0][6:].isupper() and said[1].startswith("base: ")


def test_one_word_that_names_a_model_is_no_prompt() -> None:
    result = quire_run("facebook/opt-125m")
    assert result.exit_code == 1 and "looks like a model's name: add a prompt" in result.stderr


def test_a_conversation_ends_with_its_input(chat_model: Path) -> None:
    first = reply(chat_model, "One")
    assert answered(quire_run("--chat", chat_model, "One", "--max-tokens", 12, stdin="")) == first + "\n"


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        (("absent/model", "hello"), None, "absent/model"),
        (("PLAIN", "two", "three"), None, "quote the prompt"),
        (("PLAIN",), None, "is a model"),
        (("PLAIN", "-"), "\n", "no prompt"),
        (("PLAIN", ""), None, "empty"),
        (("x" * 300, "hello"), None, "x" * 300),
        (("~nouserzz/x", "hello"), None, "~nouserzz/x"),
        (("PLAIN", "a" * 5000), None, "maximum context length is 4096 tokens"),
        (("PLAIN", "hello", "--temperature", "-1"), None, "temperature"),
        (("PLAIN", "hello", "--max-tokens", "0"), None, "max_tokens"),
        (("PLAIN", "hello", "--dtype", "int3"), None, "int3"),
        (("PLAIN", "hello", "--max-model-len", "99999"), None, "4096"),
        (("hello", "--revision", "main"), None, "--revision"),
        (("--chat", "PLAIN", "hello"), "", "template"),
        (("--image", "/nowhere.png", "hello"), None, "/nowhere.png: No such file"),
        (("--image", __file__, "hello"), None, "is no picture"),
    ],
)
def test_an_error_is_one_line(plain_model: Path, args: tuple[str, ...], stdin: str | None, message: str) -> None:
    result = quire_run(*(plain_model if word == "PLAIN" else word for word in args), stdin=stdin)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not result.stdout.strip()


def test_a_long_prompt_is_no_file_name() -> None:
    assert answered(quire_run("a" * 300, "--max-tokens", 1))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run {} -  <&-", "no prompt"),
        ("run {} Once --max-tokens 12 >&-", None),
        ("run {} Once --max-tokens 12 2>&-", None),
        ("run {} Once --max-tokens 12 >/dev/full", "No space left"),
        ("run {} Once --max-tokens 12 | head -c 1 >/dev/null", None),
        ("models >/dev/full", "No space left"),
        ("models --json >/dev/full", "No space left"),
        ("doctor --json >/dev/full", "No space left"),
        ("--version >/dev/full", "No space left"),
        ("models >&-", None),
        ("run {} - < <(printf '\\xff')", "0xff"),
        ("run {} --chat <<< $'\\xff'", "0xff"),
    ],
)
def test_streams_that_are_closed_full_or_broken(chat_model: Path, command: str, message: str | None) -> None:
    words = f"{sys.executable} -m quire {command.format(chat_model)}"
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, env=environment)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if message is None:
        assert done.returncode == 0 and not done.stderr
    else:
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr


def test_text_that_the_output_cannot_spell_is_replaced() -> None:
    code = "from quire.cli.terminal import usable_streams\nwith usable_streams(): print('a\u20ac')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a?\n", "")


def test_contradicting_options_are_a_usage_error(plain_model: Path) -> None:
    assert quire_run(plain_model, "hello", "--chat", "--raw").exit_code == 2


# -- on a terminal ----------------------------------------------------------------------------------------


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self, *args: str, size: tuple[int, int] = (80, 24)) -> None:
        """size: columns and lines."""
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, size[::-1])
        command = [sys.executable, "-m", "quire", *args]
        # On a terminal Ctrl-C is heard, whether or not these tests are a background job, which ignores it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        finally:
            signal.signal(signal.SIGINT, before)
            os.close(theirs)
        self.fd, self.seen = ours, ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read_until(self, pattern: str, seconds: float = 60) -> str:
        """Read until the pattern has come; return what was read up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come, but {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def interrupt(self) -> None:
        os.killpg(self.process.pid, 2)

    def interrupt_until(self, pattern: str) -> None:
        """Press again where nothing came: CPython's readline loses a signal that meets it handling a key."""
        for _ in range(60):
            self.interrupt()
            with suppress(AssertionError):
                self.read_until(pattern, seconds=1)
                return
        raise AssertionError(f"{pattern!r} did not come, but {self.seen!r}")

    def end(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self.fd)


def test_interrupting_an_answer_ends_the_answer_only(chat_model: Path) -> None:
    terminal = Terminal("run", "--chat", str(chat_model), "--max-tokens", "4000")
    terminal.read_until(PROMPT)
    terminal.type("One\n")
    terminal.read_until("One\r?\n(.|\n)*[a-z]{5}")
    terminal.interrupt()
    assert "interrupted" in terminal.read_until(PROMPT)
    terminal.type("dropped")
    terminal.read_until("dropped")
    terminal.interrupt_until(PROMPT)
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_interrupting_the_only_answer_ends_the_program(plain_model: Path) -> None:
    terminal = Terminal("run", str(plain_model), "Once", "--max-tokens", "4000")
    terminal.read_until(r"loading .*\n(.|\n)*[a-z]{5}")
    terminal.interrupt()
    terminal.read_until("interrupted")
    assert terminal.end() == 130


@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_it_says_at_once_what_it_does_and_ctrl_c_ends_that(plain_model: Path, seconds: float) -> None:
    """Wherever the imports are: some libraries pass an exception over that comes in the middle of them."""
    terminal = Terminal("run", str(plain_model), "Once", "--max-tokens", "4000")
    assert "loading " in terminal.read_until(str(plain_model))
    time.sleep(seconds)
    terminal.interrupt()
    assert terminal.end() == 130


def test_it_says_what_it_does_before_torch_is_imported(plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a line for each module
    terminal = Terminal("run", str(plain_model), "Once")
    before = terminal.read_until("loading ")
    terminal.process.kill()
    assert terminal.end() == -signal.SIGKILL
    assert re.search(r"\| +typer\b", before) and not re.search(r"\| +torch\b", before)


def test_a_reader_that_goes_away_ends_the_program(plain_model: Path) -> None:
    command = [sys.executable, "-m", "quire", "run", str(plain_model), "Once", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
