"""Stop strings: where the first of them ends in a text that comes piece by piece.

All of a request's are one automaton (Aho and Corasick, "Efficient string matching", 1975), made once when the request
arrives and shared by its sequences: a character costs as much with 64 stop strings as with one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class StopStrings:
    """The automaton. Its nodes are the texts with which stop strings begin; node 0 is the empty one.

    A request may have 64 stop strings of 1,024 characters, so what there is for each node is lists and arrays.

    first: the characters that stop strings begin with.
    letters: the character that leads from a node to the next number, "" where nothing follows.
    branches: the characters that lead elsewhere, and where to; few nodes have any.
    falls: where to go on with a character that leads nowhere: to the longest end of the node's text that is a node too,
        and that does not lack this character for certain (Knuth, Morris and Pratt's refinement).
    ends: 1 + the number of the longest stop string that the node's text ends with, or 0.
    held: how many characters at the end of the node's text may yet become a stop string.
    """

    __slots__ = ("branches", "ends", "falls", "first", "held", "letters", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: at least one, and none of them empty."""
        self.stops = sorted(set(stops))
        self.first = frozenset(stop[0] for stop in self.stops)
        self.letters = [""]
        self.branches: dict[int, dict[str, int]] = {}
        self.ends = array("i", [0])
        self._add_nodes()
        self.falls, self.held = self._links()

    def _add_nodes(self) -> None:
        """A path of nodes for each stop string. They are sorted: what one has of those before, the last one has."""
        same = {letter: letter for stop in self.stops for letter in stop}  # one object for each character
        letters, path, before = self.letters, [0], ""
        for number, stop in enumerate(self.stops, 1):
            common = _common(before, stop)
            parent, new = path[common], len(letters)
            if parent == new - 1:
                letters[parent] = same[stop[common]]
            else:
                self.branches.setdefault(parent, {})[stop[common]] = new
            letters.extend(same[letter] for letter in stop[common + 1 :])
            letters.append("")
            path[common + 1 :] = range(new, len(letters))
            self.ends.extend([0] * (len(letters) - new))
            self.ends[-1] = number
            before = stop

    def _links(self) -> tuple[array[int], array[int]]:
        """(falls, held), and all of ends. Short texts come first, as the others fall to them."""
        letters, branches, ends = self.letters, self.branches, self.ends
        falls, held = [0] * len(letters), [0] * len(letters)
        suffixes = [0] * len(letters)  # the longest end that is a node
        level, depth = [0], 0
        while level:
            children = []
            depth += 1
            for node in level:
                edges = [(letters[node], node + 1)] if letters[node] else []
                if node in branches:
                    edges += branches[node].items()
                for letter, child in edges:
                    children.append(child)
                    suffix = self._next(falls, suffixes[node], letter) if node else 0
                    follows = letters[child]
                    held[child] = depth if follows else held[suffix]
                    if suffix:
                        suffixes[child] = suffix
                        as_this = follows == letters[suffix] and suffix not in branches
                        falls[child] = falls[suffix] if as_this else suffix
                        ends[child] = ends[child] or ends[suffix]
            level = children
        return array("i", falls), array("i", held)

    def _next(self, falls: list[int], node: int, letter: str) -> int:
        """The node that a character leads to."""
        while self.letters[node] != letter:
            if node in self.branches and letter in self.branches[node]:
                return self.branches[node][letter]
            if not node:
                return 0
            node = falls[node]
        return node + 1


class StopMatcher:
    """Where one sequence's text is among the stop strings.

    held: how many characters at its end may yet become a stop string. A whole one that did not count is past; what it
        ends with may still begin another.
    """

    __slots__ = ("_first", "_node", "_stops", "held")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._first = stops.first
        self._node = 0
        self.held = 0

    def feed(self, text: str, armed: bool) -> tuple[str, int] | None:
        """(stop string, characters of `text` past it) for the first match, if one counts (armed).

        Of those that end at the same character, the longest. After a match nothing more may be fed.
        """
        if not self.held and self._first.isdisjoint(text):
            return None
        stops = self._stops
        letters, branches, falls, ends = stops.letters, stops.branches, stops.falls, stops.ends
        node = self._node
        for place, letter in enumerate(text):
            while letters[node] != letter:  # `StopStrings._next`, without a call for each character
                if node in branches and letter in branches[node]:
                    node = branches[node][letter]
                    break
                if not node:
                    break
                node = falls[node]
            else:
                node += 1
            if ends[node] and armed:
                return stops.stops[ends[node] - 1], len(text) - place - 1
        self._node, self.held = node, stops.held[node]
        return None

    def copy(self) -> StopMatcher:
        other = StopMatcher(self._stops)
        other._node, other.held = self._node, self.held
        return other


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    length = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        length += 1
    return length
