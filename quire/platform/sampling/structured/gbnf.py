"""GBNF, llama.cpp's notation of grammars (and what vLLM's users call EBNF), as Lark.

Rules that do not lead back to themselves are regular: each is one terminal, so that where one of its parts ends and the
next begins is found by trying all ways. The others stay rules, and what is regular within them becomes terminals as
long as they can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.rules import bottom_up
from quire.platform.sampling.structured.json_schema.texts import regex_of_text
from quire.platform.sampling.structured.pattern_writing import written
from quire.platform.sampling.structured.patterns import ANY, Set, parse

MAX_RULES = 10_000
MAX_DEPTH = 60  # groups within each other
MAX_REPEAT = 100_000

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<defines>::=)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<set>\[\^?(?:[^\]\\\n]|\\.)*\])
    |(?P<times>\{[ ]*\d*[ ]*(?:,[ ]*\d*[ ]*)?\})
    |(?P<sign>[|()*+?.;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))""", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Terminal:
    """A regular expression, as Lark takes it between slashes."""

    regex: str


@dataclass(frozen=True, slots=True)
class Name:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """Alternatives, each a sequence, so many times."""

    options: tuple[tuple[Item, ...], ...]
    least: int = 1
    most: int | None = 1


Item = Terminal | Name | Group


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def gbnf_as_lark(text: str) -> str:
    """A grammar in Lark's notation. Raises RequestError with the line of what is wrong."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise RequestError('grammar: there is no rule "root", with which a grammar in this notation begins.')
    return _Writer({name: group for name, (group, _) in rules.items()}).text()


def _refused(line: int, what: str) -> RequestError:
    return RequestError(f"grammar: line {line}: {what}.")


def _tokens(text: str) -> Iterator[_Token]:
    place, line = 0, 1
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise _refused(line, f"{text[place : place + 20]!r} is no part of a rule")
        kind = found.lastgroup or ""
        if kind != "space":
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")
        place = found.end()


class _Reader:
    """A parser of rules: a rule goes on until another one is defined."""

    def __init__(self, text: str) -> None:
        self.tokens = [*_tokens(text), _Token("end", "", text.count("\n") + 1)]
        self.place = 0
        self.known: dict[str, int] = {}

    def rules(self) -> dict[str, tuple[Group, int]]:
        """name -> what it stands for, and its line."""
        found: dict[str, tuple[Group, int]] = {}
        while self._now.kind != "end":
            name = self._now
            if not self._defines():
                raise _refused(name.line, f"{name.text!r} stands where a rule begins: name ::= ...")
            self.place += 2
            if name.text in found:
                raise _refused(name.line, f"the rule {name.text!r} is defined in line {found[name.text][1]}")
            found[name.text] = self._options(0), name.line
            if self._now.text == ";":
                self.place += 1
            elif self._now.kind != "end" and not self._defines():
                raise _refused(self._now.line, f"{self._now.text!r} is not expected here")
            if len(found) > MAX_RULES:
                raise RequestError(f"grammar: more than {MAX_RULES:,} rules, the limit.")
        for name_, line in self.known.items():
            if name_ not in found:
                raise _refused(line, f"there is no rule {name_!r}")
        return found

    @property
    def _now(self) -> _Token:
        return self.tokens[self.place]

    def _defines(self) -> bool:
        return self._now.kind == "name" and self.tokens[self.place + 1].kind == "defines"

    def _options(self, depth: int) -> Group:
        if depth > MAX_DEPTH:
            raise _refused(self._now.line, f"more than {MAX_DEPTH} groups within each other, the limit")
        options = [self._sequence(depth)]
        while self._now.text == "|" and self._now.kind == "sign":
            self.place += 1
            options.append(self._sequence(depth))
        return Group(tuple(options))

    def _sequence(self, depth: int) -> tuple[Item, ...]:
        items: list[Item] = []
        while (item := self._item(depth)) is not None:
            least: int = 1
            most: int | None = 1
            while (times := self._times()) is not None:
                least *= times[0]
                most = None if most is None or times[1] is None else most * times[1]
                if max(least, most or 0) > MAX_REPEAT:
                    raise _refused(self._now.line, f"more than {MAX_REPEAT:,} repetitions, the limit")
            items.append(item if (least, most) == (1, 1) else Group(((item,),), least, most))
        return tuple(items)

    def _item(self, depth: int) -> Item | None:
        token = self._now
        if token.kind == "name":
            if self._defines():
                return None
            self.known.setdefault(token.text, token.line)
            self.place += 1
            return Name(token.text)
        if token.kind == "text":
            self.place += 1
            return Terminal(regex_of_text(_unescaped(token)) or "(?:)")
        if token.kind == "set":
            self.place += 1
            return Terminal(_set(token))
        if token.kind != "sign" or token.text not in ".(":
            return None
        self.place += 1
        if token.text == ".":
            return Terminal(written(Set(ANY)))
        group = self._options(depth + 1)
        if self._now.text != ")":
            raise _refused(token.line, "this '(' is not closed")
        self.place += 1
        return group

    def _times(self) -> tuple[int, int | None] | None:
        token = self._now
        if token.kind == "sign" and token.text in "*+?":
            self.place += 1
            return (1 if token.text == "+" else 0), (1 if token.text == "?" else None)
        if token.kind != "times":
            return None
        self.place += 1
        low, comma, high = (part.strip() for part in token.text[1:-1].partition(","))
        if (not low and not high) or max(len(low), len(high)) > 9:
            raise _refused(token.line, f"{token.text} does not say how often")
        least = int(low or "0")
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            raise _refused(token.line, f"{token.text}: the bounds are the wrong way round")
        return least, most


def _unescaped(token: _Token) -> str:
    def char(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code is None:
            return _LETTERS.get(found[4], found[4])
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise _refused(token.line, f"{found[0]} is no character")
        return chr(number)

    return _ESCAPE.sub(char, token.text[1:-1])


def _set(token: _Token) -> str:
    inner = token.text[1:-1].replace("[", "\\[").replace("\\\\[", "\\[")
    try:
        node = parse(f"[{inner}]")
    except RequestError as error:
        raise _refused(token.line, str(error).rstrip(".")) from None
    if isinstance(node, Set) and not node.chars:
        raise _refused(token.line, f"{token.text} is no character at all")
    return written(node)


class _Writer:
    """Which rules are regular, and all of them as Lark."""

    def __init__(self, rules: dict[str, Group]) -> None:
        self.rules = rules
        self.uses = {name: set(_names(group)) for name, group in rules.items()}
        self.recursive = _recursive(self.uses)
        self.names = {name: f"{'r' if name in self.recursive else 'T'}{place}" for place, name in enumerate(rules)}
        self.lines: list[str] = []
        self.made: dict[str, str] = {}

    def text(self) -> str:
        """All rules that the root leads to. Raises RequestError if one of them never comes to an end."""
        endless = set(self.rules) - _ending(self.rules)
        reached, pending = {"root"}, ["root"]
        while pending:
            name = pending.pop()
            if name in endless:
                raise RequestError(f"grammar: no text can be made of the rule {name!r}: it never comes to an end.")
            group = self.rules[name]
            body = self._rule(group) if name in self.recursive else self._terminal(group)
            self.lines.append(f"{self.names[name]}: {body}")
            for used in self.uses[name] - reached:
                reached.add(used)
                pending.append(used)
        lark = "\n".join([f"start: {self.names['root']}", *self.lines]) + "\n"
        return bottom_up(lark, self.names["root"], [line.partition(":")[0] for line in self.lines])

    def _terminal(self, item: Item) -> str:
        """In a terminal, whose parts are terminals."""
        if isinstance(item, Terminal):
            return f"/{item.regex}/"
        if isinstance(item, Name):
            return self.names[item.name]
        options = (" ".join(self._terminal(one) for one in option) or "/(?:)/" for option in item.options)
        return f"({' | '.join(options)}){_times(item)}"

    def _rule(self, item: Group) -> str:
        options = (self._sequence(option) for option in item.options)
        return f"({' | '.join(options)}){_times(item)}"

    def _sequence(self, items: tuple[Item, ...]) -> str:
        """What is regular and stands together is one terminal."""
        parts: list[str] = []
        run: list[Item] = []
        for item in (*items, None):
            if item is not None and self._is_regular(item):
                run.append(item)
                continue
            if run:
                parts.append(self._made(" ".join(map(self._terminal, run))))
                run = []
            if isinstance(item, Name):
                parts.append(self.names[item.name])
            elif isinstance(item, Group):
                parts.append(self._rule(item))
        return " ".join(parts) or '""'

    def _made(self, expression: str) -> str:
        if expression not in self.made:
            self.made[expression] = f"M{len(self.made)}"
            self.lines.append(f"{self.made[expression]}: {expression}")
        return self.made[expression]

    def _is_regular(self, item: Item) -> bool:
        if isinstance(item, Group):
            return all(self._is_regular(one) for option in item.options for one in option)
        return isinstance(item, Terminal) or item.name not in self.recursive


def _names(item: Item) -> Iterator[str]:
    if isinstance(item, Name):
        yield item.name
    elif isinstance(item, Group):
        for option in item.options:
            for one in option:
                yield from _names(one)


def _times(group: Group) -> str:
    if (group.least, group.most) == (1, 1):
        return ""
    sign = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((group.least, group.most))
    return sign or f"{{{group.least},{'' if group.most is None else group.most}}}"


def _recursive(uses: dict[str, set[str]]) -> set[str]:
    """The rules from which one can be reached that leads back to itself."""
    # What has only regular rules below it is regular: found from the bottom up.
    users: dict[str, list[str]] = {}
    left = {name: len(used) for name, used in uses.items()}
    for name, used in uses.items():
        for one in used:
            users.setdefault(one, []).append(name)
    pending = [name for name, count in left.items() if not count]
    regular = set(pending)
    while pending:
        for user in users.get(pending.pop(), ()):
            left[user] -= 1
            if not left[user]:
                regular.add(user)
                pending.append(user)
    return set(uses) - regular


def _ending(rules: dict[str, Group]) -> set[str]:
    """The rules of which a text can be made."""
    found: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, group in rules.items():
        for used in _names(group):
            users.setdefault(used, []).append(name)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in found and _can_end(rules[name], found):
            found.add(name)
            pending += users.get(name, ())
    return found


def _can_end(item: Item, found: set[str]) -> bool:
    if isinstance(item, Group):
        return item.least == 0 or any(all(_can_end(one, found) for one in option) for option in item.options)
    return isinstance(item, Terminal) or item.name in found
