"""Markers in token ids: whether there are as many as media, and what stands around a video's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.multimodal import check_count, kind_of
from quire.platform.inputs.image_spec import ImageInputSpec


@dataclass(frozen=True)
class AroundIds:
    """What stands around each marker, as it is written in token ids where they lack it.

    marker: the marker's token. before, behind: the texts. encode, decode: of the engine's tokenizer, without special
    tokens of its own. A text has become other tokens where words before it ran together with it: so it is looked for
    as text.
    """

    marker: int
    before: str
    behind: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def complete(self, ids: list[int]) -> list[int]:
        """The ids with these texts before and behind each marker."""
        made: list[int] = []
        for place, token in enumerate(ids):
            if token != self.marker:
                made.append(token)
                continue
            # No token is shorter than a byte.
            near = ids[max(0, place - 2 * len(self.before.encode())) : place]
            following = ids[place + 1 : place + 1 + 2 * len(self.behind.encode())]
            if self.before and not self.decode(near).endswith(self.before):
                made += self.encode(self.before)
            made.append(token)
            if self.behind and not self.decode(following).startswith(self.behind):
                made += self.encode(self.behind)
        return made


def check_markers(spec: ImageInputSpec, ids: Sequence[int], sources: Sequence[Any], exactly: bool) -> None:
    """One for each image, or another kind; ids that a caller made may have all placeholders already.

    Raises RequestError. Where a kind's placeholders are another kind's markers, what is whose is found when they are
    known.
    """
    counts = Counter(kind_of(source) for source in sources)
    for kind in counts.keys() - spec.markers.keys():
        raise RequestError(f"this model takes no {kind}")
    placed = {
        kind
        for kind, marker in spec.markers.items()
        if kind != "image" and counts[kind] and not exactly and marker not in spec.placeholders and marker not in ids
    }
    if placed and spec.placeholders.isdisjoint(ids):
        placed = set()
    for kind, marker in spec.markers.items():
        markers = ids.count(marker)
        if kind in placed or (placed and marker in spec.placeholders and markers >= counts[kind]):
            continue
        if exactly or markers < counts[kind] or not counts[kind]:
            check_count(markers, counts[kind], kind)
