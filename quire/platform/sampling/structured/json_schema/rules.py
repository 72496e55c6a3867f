"""A grammar in the making: rules and terminals, what of them can come to an end, and their text in Lark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.errors import RequestError

MAX_RULES = 10_000
SHALLOW = 150  # rules that may lead to each other in a line
MAX_TEXT = 16_000_000  # characters of the finished grammar
MAX_REPEATED = 1_000_000  # times that a rule is repeated, least or most


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule or terminal by its name. call: what the parameter of a rule that has one becomes."""

    name: str
    call: str = ""


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of these; none of them: nothing at all."""

    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    of: Expr
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class When:
    """An alternative of a rule with a parameter, if a condition holds of that."""

    of: Expr
    condition: str


Expr = Ref | Seq | Alt | Rep | When
EMPTY, NEVER = Seq(()), Alt(())


def sequence(*parts: Expr) -> Expr:
    """One after the other; nothing if one of them is."""
    flat: list[Expr] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        flat += part.parts if isinstance(part, Seq) else (part,)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def choice(options: Iterable[Expr]) -> Expr:
    """One of these, each once."""
    flat: dict[Expr, None] = {}
    for option in options:
        for one in option.options if isinstance(option, Alt) else (option,):
            flat[one] = None
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeated(of: Expr, least: int, most: int | None) -> Expr:
    """So many times."""
    if most is not None and most < least:
        return NEVER
    if most == 0:
        return EMPTY
    if max(least, most or 0) > MAX_REPEATED:
        raise RequestError(f"more than {MAX_REPEATED:,} elements or properties are counted, the limit.")
    return of if (least, most) == (1, 1) else Rep(of, least, most)


@dataclass
class Grammar:
    """Rules by name; terminals by what they match."""

    rules: dict[str, Expr] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)  # by their expressions; j: schemas of their own
    with_parameter: set[str] = field(default_factory=set)
    # Of some of these: how many of the alternatives that end there have to be possible, since each is taken once.
    different: dict[str, int] = field(default_factory=dict)

    def terminal(self, expression: str) -> Ref:
        """A terminal's name, by its Lark expression."""
        return Ref(self.terminals.setdefault(expression, f"T{len(self.terminals)}"))

    def literal(self, text: str) -> Ref:
        """A terminal that is exactly this text: ASCII without control characters."""
        quoted = text.replace("\\", "\\\\").replace('"', '\\"')
        return self.terminal(f'"{quoted}"')

    def special(self, token_id: int) -> Ref:
        """A special token."""
        return Ref(f"<[{token_id}]>")

    def schema(self, expression: str) -> Ref:
        """A rule that llguidance makes of a JSON schema by itself."""
        return Ref(self.terminals.setdefault(expression, f"j{len(self.terminals)}"))

    def rule(self, expr: Expr) -> Expr:
        """A new rule's name, for what would otherwise be written more than once."""
        if isinstance(expr, Ref) or expr in (EMPTY, NEVER):
            return expr
        name = self.new_name()
        self.rules[name] = expr
        return Ref(name)

    def new_name(self) -> str:
        if len(self.rules) >= MAX_RULES:
            raise RequestError(
                f"json schema: its grammar has more than {MAX_RULES:,} rules, the limit: make it smaller."
            )
        name = f"r{len(self.rules)}"
        self.rules[name] = NEVER
        return name

    def comes_to_an_end(self, start: str) -> bool:
        """Whether a text can be made of a rule."""
        return start in self._productive()

    def text(self, start: str) -> str | None:
        """In Lark, without what never comes to an end; None: the start does not."""
        productive = self._productive()
        if start not in productive:
            return None
        lines = [f"start: {start}"]
        reached, pending = {start}, [start]
        size = 0
        named = {name: expression for expression, name in self.terminals.items()}
        while pending:
            name = pending.pop()
            if name in named:
                lines.append(f"{name}: {named[name]}")
            else:
                expr = _pruned(self.rules[name], productive)
                head = f"{name}::_" if name in self.with_parameter else name
                lines.append(f"{head}: {_written(expr)}")
                for found in _names(expr):
                    if found not in reached and not _is_outside(found):
                        reached.add(found)
                        pending.append(found)
            size += len(lines[-1])
            if size > MAX_TEXT:
                raise RequestError(f"json schema: its grammar has more than {MAX_TEXT:,} characters, the limit.")
        order = [one.partition(":")[0] for one in lines[1:]]
        return bottom_up("\n".join(lines) + "\n", start, [one for one in order if one not in self.with_parameter])

    def _productive(self) -> set[str]:
        """The names from which a text can be made."""
        found = set(self.terminals.values())
        users: dict[str, set[str]] = {}
        for name, expr in self.rules.items():
            for used in _names(expr):
                users.setdefault(used, set()).add(name)
        pending = list(self.rules)
        while pending:
            name = pending.pop()
            if name not in found and _can_end(self.rules[name], found) and self._are_enough(name, found):
                found.add(name)
                pending += users.get(name, ())
        return found

    def _are_enough(self, name: str, found: set[str]) -> bool:
        if name not in self.different:
            return True
        expr = self.rules[name]
        options = expr.options if isinstance(expr, Alt) else (expr,)
        ends = [one for one in options if name not in _names(one)]
        return sum(_can_end(one, found) for one in ends) >= self.different[name]


def bottom_up(lark: str, start: str, names: list[str]) -> str:
    """The same grammar, so that llguidance reads the last one of `names` first: all that it refers to is known then.

    It follows references from rule to rule, each one deeper in its stack, which has an end: some thousand rules that
    lead to each other in a line would be the end of the process.
    """
    if len(names) < SHALLOW:
        return lark
    first = f"start: NEVER known | {start}\nNEVER: /a/ & /b/\nknown: {' '.join(reversed(names))}\n"
    return first + lark.partition("\n")[2]


def _is_outside(name: str) -> bool:
    """A special token or a grammar of its own."""
    return name[0] in "<@"


def _names(expr: Expr) -> list[str]:
    names, pending = [], [expr]
    while pending:
        one = pending.pop()
        if isinstance(one, Ref):
            names.append(one.name)
        else:
            pending += _inner(one)
    return names


def _inner(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Seq):
        return expr.parts
    if isinstance(expr, Alt):
        return expr.options
    return () if isinstance(expr, Ref) else (expr.of,)


def _can_end(expr: Expr, found: set[str]) -> bool:
    if isinstance(expr, Ref):
        return expr.name in found or _is_outside(expr.name)
    if isinstance(expr, Seq):
        return all(_can_end(one, found) for one in expr.parts)
    if isinstance(expr, Alt):
        return any(_can_end(one, found) for one in expr.options)
    return (isinstance(expr, Rep) and expr.least == 0) or _can_end(expr.of, found)


def _pruned(expr: Expr, found: set[str]) -> Expr:
    if isinstance(expr, Seq):
        return sequence(*(_pruned(one, found) for one in expr.parts))
    if isinstance(expr, Alt):
        return choice(_pruned(one, found) for one in expr.options if _can_end(one, found))
    if isinstance(expr, Rep):
        return Rep(_pruned(expr.of, found), expr.least, expr.most) if _can_end(expr.of, found) else EMPTY
    if isinstance(expr, When):
        return When(_pruned(expr.of, found), expr.condition)
    return expr


def _written(expr: Expr, *, inner: bool = False) -> str:
    if isinstance(expr, Ref):
        return expr.name + (f"::{expr.call}" if expr.call else "")
    if isinstance(expr, Seq):
        text = " ".join(_written(one, inner=True) for one in expr.parts) or '""'
        return f"({text})" if inner and len(expr.parts) > 1 else text
    if isinstance(expr, Alt):
        text = " | ".join(_written(one) for one in expr.options)
        return f"({text})" if inner else text
    if isinstance(expr, When):
        return f"{_written(expr.of, inner=isinstance(expr.of, Alt))} %if {expr.condition}"
    text = _written(expr.of, inner=True)
    sign = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((expr.least, expr.most))
    return text + (sign or f"{{{expr.least},{'' if expr.most is None else expr.most}}}")
