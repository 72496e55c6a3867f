"""What becomes of a sequence that had drafts in a step."""

from __future__ import annotations

from collections.abc import Sequence

from quire.platform.kv.manager import KVManager
from quire.platform.sampling.results import Sampled
from quire.platform.scheduling.drafting import Drafting
from quire.platform.scheduling.plan import Chunk
from quire.platform.scheduling.request import SequenceState


def take_drafted(
    sequence: SequenceState, chunk: Chunk, sampled: Sequence[Sampled], drafting: Drafting, kv: KVManager
) -> int:
    """A sequence gets the tokens that were drawn behind its drafts, and blocks hold those that were among these.
    Returns how many it has got."""
    before = len(sequence.output_ids)
    computed = drafting.checked(sequence, chunk, sampled)
    if sequence.running:
        sequence.advance(computed)
        kv.publish(sequence.id, sequence.token_ids, chunk.start, chunk.known_end + computed)
    return len(sequence.output_ids) - before
