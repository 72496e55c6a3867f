"""Conversations on the terminal: a line that begins with a slash is for the program, every other one for the model."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import typer

from quire.cli.prompts import undecodable
from quire.cli.terminal import error_console, note, plain, print_error
from quire.errors import QuireError

BASE = "base"  # what --lora and /lora call the model itself

# Green; the \x01 and \x02 tell readline what takes no room. `input` itself prints it, once it listens to Ctrl-C.
_ASK = "\x01\x1b[1;32m\x02>>> \x01\x1b[0m\x02"

Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What was streamed, and how fast. Times in seconds; rate in tokens per second after the first token.

    finish_reason: OpenAI's, or "interrupted".
    """

    text: str
    num_tokens: int
    finish_reason: str
    time_to_first_token: float
    rate: float | None


class Partner(Protocol):
    """Who answers: an engine of this process, or a server. Both raise QuireError for what cannot be answered."""

    def answer(self, messages: Sequence[Message]) -> Answer:
        """Write the answer to standard output as it comes, until its end or Ctrl-C."""
        ...

    def picture(self, source: str) -> Message:
        """The part of a message that has the picture of this file or URL, in OpenAI's form."""
        ...

    def choose(self, name: str) -> None:
        """Answer with this adapter from now on; `BASE`: with the model itself."""
        ...

    def names(self) -> Sequence[str]:
        """What `choose` takes, as far as it is known."""
        ...


@dataclass(frozen=True)
class Command:
    """What can be said with a slash. argument: as /help shows it; in brackets where it may be left out."""

    argument: str
    says: str
    run: Callable[[str], None]


class Dialogue(ABC):
    """Asks for lines, runs those with a slash, and gives the others to `say`, until the user leaves."""

    def __init__(self, partner: Partner, verbose: bool) -> None:
        self.partner = partner
        self.verbose = verbose
        self.commands = {
            "help": Command("", "show this list", self._help),
            "lora": Command("NAME", f"answer with this adapter; {BASE}: with the model itself", self._lora),
            "exit": Command("", "leave (so does Ctrl-D)", self._exit),
        }

    def hold(self, first: str | None) -> None:
        """first: said before anything is asked for. Raises typer.Exit when nobody is there to mend an error."""
        if sys.stdin.isatty():
            note("/help lists the commands; Ctrl-C ends an answer; /exit or Ctrl-D leaves.")
        try:
            if first is not None:
                self._take(self.say, first)
            while (line := _ask()) is not None:
                self._hear(line)
        except EOFError:
            return

    @abstractmethod
    def say(self, text: str) -> Answer:
        """Give a text to the model, and show and return its answer."""

    def _hear(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            self._take(self._command, line[1:])
        elif line:
            self._take(self.say, line[1:] if line.startswith("/") else line)

    def _take(self, act: Callable[[str], object], text: str) -> None:
        try:
            act(text)
        except QuireError as error:
            print_error(error)
            if not sys.stdin.isatty():  # nobody is there to mend it
                raise typer.Exit(1) from None

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self.commands.get(name)
        if command is None:
            raise QuireError(
                f"there is no command /{name[:50]}: /help lists them, and a text that begins with a slash is sent "
                f"with two, as in //{line[:50]}"
            )
        argument = argument.strip()
        if argument and not command.argument:
            raise QuireError(f"/{name} takes nothing after it.")
        if not argument and command.argument and not command.argument.startswith("["):
            raise QuireError(f"/{name} {command.argument}: {command.says}.{self._choices(name)}")
        command.run(argument)

    def _choices(self, name: str) -> str:
        return f" There are {', '.join(self.partner.names())}." if name == "lora" else ""

    def _help(self, _: str) -> None:
        out = error_console()
        for name, command in self.commands.items():
            out.print(f"/{name} {command.argument}".ljust(17) + command.says, markup=False)
        out.print("//text".ljust(17) + "send /text to the model", markup=False)

    def _lora(self, name: str) -> None:
        self.partner.choose(name)
        note(f"{name} answers from now on.")

    def _exit(self, _: str) -> None:
        raise EOFError


class Conversation(Dialogue):
    """A dialogue that remembers what has been said, pictures and all."""

    def __init__(self, partner: Partner, verbose: bool, system: str | None = None, images: Sequence[str] = ()) -> None:
        """images: files or URLs that the first message has. Raises QuireError for one that cannot be read."""
        super().__init__(partner, verbose)
        self.messages: list[Message] = []
        self.system = system
        self._pictures = [partner.picture(source) for source in images]
        self._saved: set[Path] = set()
        forget = "forget the conversation"
        self.commands = {
            "help": self.commands["help"],
            "image": Command("FILE", "put a picture before the next message", self._image),
            "system": Command("[TEXT]", "tell the model how to answer; without TEXT, no longer", self._system),
            "lora": self.commands["lora"],
            "reset": Command("", f"{forget} (/system stays)", self._reset),
            "clear": Command("", "the same as /reset", self._reset),
            "save": Command("FILE", "write the conversation: as JSON to FILE.json, else as text", self._save),
            "exit": self.commands["exit"],
        }

    def say(self, text: str) -> Answer:
        pictures, self._pictures = self._pictures, []
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        self.messages.append({"role": "user", "content": content})
        try:
            answer = self.partner.answer(self.all_messages())
        except QuireError as error:
            self.messages.pop()
            raise QuireError(f"{error} (/reset forgets the conversation so far)" if self.messages else error) from None
        self.messages.append({"role": "assistant", "content": answer.text})
        report(answer, self.verbose)
        return answer

    def all_messages(self) -> list[Message]:
        """What the model is given: the system's message, if there is one, and all that has been said."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _image(self, source: str) -> None:
        self._pictures.append(self.partner.picture(source))
        note(f"{len(self._pictures)} picture{'s' * (len(self._pictures) > 1)} will go with your next message.")

    def _system(self, text: str) -> None:
        self.system = text or None
        note("The model is told so from now on." if text else "The model is told nothing any more.")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self._pictures.clear()

    def _save(self, name: str) -> None:
        """Into a new file, or one that this conversation was saved to before."""
        path = Path(name).expanduser().absolute()
        as_json = path.suffix == ".json"
        said = self.all_messages()
        text = json.dumps(said, ensure_ascii=False, indent=1) if as_json else "\n\n".join(map(_as_text, said))
        try:
            with open(path, "w" if path in self._saved else "x", encoding="utf-8", errors="replace") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise QuireError(f"/save {name}: there is such a file already; give another name.") from None
        except (OSError, ValueError) as error:
            raise QuireError(f"/save {name}: {getattr(error, 'strerror', None) or error}") from None
        self._saved.add(path)
        note(f"{len(said)} messages in {path}")


def _as_text(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join("[picture] " if part["type"] == "image_url" else part["text"] for part in content)
    return f"{message['role']}: {content}"


def _ask() -> str | None:
    """The user's next line; None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (importing it gives `input` line editing and a history)
    try:
        return input(_ASK if interactive else "").strip()
    except EOFError:
        if interactive:
            print()
        return None
    except UnicodeDecodeError as error:
        raise undecodable(error) from None
    except KeyboardInterrupt:  # the line is dropped, as in a shell
        print()
        return ""


def report(answer: Answer, verbose: bool) -> None:
    """A line about the answer's length and speed: on a terminal, or where it was asked for."""
    out = error_console()
    if not (verbose or out.is_terminal):
        return
    facts = [f"{answer.num_tokens} token{'s' * (answer.num_tokens != 1)}"]
    if answer.rate is not None:
        facts.append(f"{answer.rate:.1f} tok/s")
    if answer.num_tokens:
        facts.append(f"first token after {answer.time_to_first_token:.2f} s")
    if answer.finish_reason != "stop":
        facts.append("cut off by the length limit" if answer.finish_reason == "length" else answer.finish_reason)
    out.print(plain(", ".join(facts)), style="dim", markup=False)
