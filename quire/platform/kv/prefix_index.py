"""Finding blocks that already hold a prompt's beginning.

A full block's key is a SHA-256 chain over its parent's key, its token ids and its images, so that equal keys mean equal
contents from the sequence's first token on. The chain's root says under which conditions the contents hold.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from quire.types import AdapterUse, PlaceholderRange, Span

# Among blocks that were found: one that is not in the pool, but was read from beside it.
ELSEWHERE = -2


def root_key(
    cache_salt: str | None = None, rope_length: int | None = None, adapters: AdapterUse = (), seen: object = None
) -> bytes:
    """The chain's start. seen: what the first token sees of later ones, as plain data; None: nothing.

    Requests with different salts (tenants), whose rotary frequencies differ, or that run with other adapters, or other
    versions of them, share nothing.
    """
    weights = [(ref.digest, weight) for ref, weight in adapters]
    parts = repr((cache_salt, rope_length, weights)).encode("utf-8", "surrogatepass")
    if seen is not None:
        parts += repr(seen).encode()
    return hashlib.sha256(parts).digest()


def feature_variant(adapters: AdapterUse, cache_salt: str | None = None) -> bytes:
    """What separates an image's features from others of the image: adapters that change what works on images, for
    theirs differ, and the salt, as tenants must not see from the time it takes what others have shown.
    """
    visual = [(ref.digest, weight) for ref, weight in adapters if ref.visual]
    return repr((visual, cache_salt)).encode("utf-8", "surrogatepass") if visual or cache_salt is not None else b""


def block_key(parent: bytes, token_ids: Sequence[int], media: Sequence[tuple[bytes, int]] = ()) -> bytes:
    """The key of a full block that holds `token_ids` and follows the block with key `parent`.

    media: (digest, offset relative to the block's first token) of each image that reaches into the block.
    """
    hashed = hashlib.sha256(parent + array("q", token_ids).tobytes())
    for digest, offset in media:
        hashed.update(b"media" + digest + array("q", [offset]).tobytes())
    return hashed.digest()


class KeyChain:
    """The keys of one sequence's full blocks, computed as they are asked for.

    root: what the chain begins with. media: the prompt's images, videos and sounds. spans: its ranges whose tokens see
    one another, so that a block which ends within one is of no use without the next. keys: of the blocks that are or
    were full; they outlive a preemption, since the tokens do.
    """

    __slots__ = ("_media", "_root", "keys", "spans")

    def __init__(
        self,
        root: bytes,
        media: Sequence[PlaceholderRange] = (),
        spans: Sequence[Span] = (),
        keys: Sequence[bytes] = (),
    ) -> None:
        self._root = root
        self._media = media
        self.spans = spans
        self.keys = list(keys)

    def extend(self, token_ids: Sequence[int], tokens: int, block_size: int) -> list[bytes]:
        """Compute the keys of the full blocks among the first `tokens` tokens; returns all that there are."""
        keys = self.keys
        for place in range(len(keys), tokens // block_size):
            start, end = place * block_size, (place + 1) * block_size
            media = [(m.digest, m.offset - start) for m in self._media if m.offset < end and start < m.end]
            keys.append(block_key(keys[-1] if keys else self._root, token_ids[start:end], media))
        return keys

    def fork(self) -> KeyChain:
        """The chain of a sequence with the same tokens so far."""
        return KeyChain(self._root, self._media, self.spans, self.keys)


class PrefixIndex:
    """A one-to-one table between keys and the blocks that hold them."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block)

    def holds(self, block: int) -> bool:
        return block in self._key

    def blocks(self) -> list[int]:
        """All that can be found."""
        return list(self._key)

    def block_of(self, key: bytes) -> int | None:
        """The block with this key; None: there is none."""
        return self._block.get(key)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known keys from the first on."""
        blocks = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, key: bytes, block: int) -> None:
        """Make a full block findable. Of two blocks with equal contents, the first stays the one that is found."""
        if key not in self._block and block not in self._key:
            self._block[key] = block
            self._key[block] = key

    def forget(self, block: int) -> None:
        """Forget a block whose contents are about to be replaced."""
        key = self._key.pop(block, None)
        if key is not None:
            del self._block[key]

    def check_integrity(self) -> None:
        """Raise AssertionError unless both tables mirror each other."""
        if len(self._block) != len(self._key) or any(self._block.get(k) != b for b, k in self._key.items()):
            raise AssertionError("prefix index: the two tables disagree")
