"""Who runs in the next step, on which blocks.

There is no prefill phase and no decode phase: every sequence has tokens, some of them computed, and each step lets
`num_computed` chase their number within one token budget. The rule of fairness is arrival order: the oldest
sequence is served first, admitted first and preempted last, so that some sequence always advances to its end.

A sequence whose adapter finds no room on the device lets others pass: those of the base model, and of adapters that are
there already, of the latter `max_num_seqs` at most (among the first thousand that wait). So what does not fit waits for
a bounded number of requests.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from quire.config import SchedulerConfig
from quire.lora import DeviceAdapterBudget
from quire.multimodal import FeatureCache
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.prefix_index import block_key
from quire.platform.kv.swap import SwapSpace
from quire.platform.sampling.results import Failure, Sampled
from quire.platform.scheduling.metrics import StepTimes
from quire.platform.scheduling.plan import PENDING_TOKEN, Chunk, EncodeImage, PromptScore, StepPlan, StepResult
from quire.platform.scheduling.request import FinishReason, MediaInput, Request, SequenceState

# How many waiting sequences have their adapters read ahead; how far behind the first one a step looks for those that
# need not wait as it does.
_READ_AHEAD = 16
_LOOK_AHEAD = 1024


@dataclass
class PlanBuilder:
    """A plan in the making, and what is left of the step's two limits."""

    tokens_left: int
    sequences_left: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    encode: list[EncodeImage] = field(default_factory=list)
    preempted: bool = False
    waits: bool = False  # some sequence for an image
    blocked: list[SequenceState] = field(default_factory=list)  # that wait for their adapters

    @property
    def full(self) -> bool:
        return self.tokens_left == 0 or self.sequences_left == 0


class Scheduler:
    """Owns the queue, the running sequences and their blocks. It never touches a tensor.

    features: whose features the runner has; feature_bytes: of one placeholder's. For models that see.
    swap: where preempted sequences keep what they have computed.
    residency: the adapters that are on the device. failed: requests whose adapters cannot be had, and why.
    wanted: images whose features and pixels are gone, to be prepared again.
    running: sequences that hold blocks, oldest first. waiting: those that hold none, oldest first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        features: FeatureCache | None = None,
        feature_bytes: int = 0,
        residency: DeviceAdapterBudget | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.swap = SwapSpace(0, pool.block_size) if swap is None else swap
        self.features = FeatureCache(0) if features is None else features
        self.feature_bytes = feature_bytes
        self.residency = residency
        self.wanted: list[tuple[Request, MediaInput]] = []
        self.failed: list[tuple[Request, str]] = []
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions of sequences that need not be computed again
        self.prompt_tokens = 0  # of requests that began to run
        self.generated_tokens = 0
        self.prefix_queries = 0  # tokens that were looked for in the prefix cache, and that were found there
        self.prefix_hits = 0
        self.times = StepTimes()  # of the last step
        self._live: dict[int, SequenceState] = {}
        self._ahead: StepPlan | None = None  # the plan that was counted as done, and not committed yet

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, sequence: SequenceState) -> None:
        """Queue a request's first sequence. The engine has checked that the pool can hold it to its end."""
        self._live[sequence.id] = sequence
        self._queue(sequence)

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """End a sequence and give its blocks back; ending it twice does nothing."""
        sequence.finish_reason = sequence.finish_reason or reason
        if self._live.pop(sequence.id, None) is None:
            return
        sequence.drop_pending()
        if sequence.running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
            self.swap.drop(sequence)
        if sequence.request.finished:
            sequence.request.end()

    def stop_at(self, sequence: SequenceState, stop: str) -> None:
        """End a sequence whose text has reached a stop string, whatever else may end it in the same step."""
        sequence.stop_at(stop)
        self.finish(sequence, "stop")

    def end(self, request: Request, reason: FinishReason) -> None:
        """End what goes on of a request."""
        for sequence in request.sequences:
            self.finish(sequence, reason)

    def fail(self, request: Request, failure: Failure) -> None:
        """End a request that cannot go on, or that could not begin."""
        request.failure = failure
        if not request.sequences:
            request.begin().finish_reason = "error"
            request.end()
        self.end(request, "error")

    # -- plan ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the next step's chunks and give them blocks."""
        self.times.clear()
        self.swap.begin_plan()
        draft = PlanBuilder(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        while not draft.chunks and not draft.waits and self.waiting and self.running and self._ahead is None:
            # Only beams run, and all wait for a sibling that waits for their blocks.
            self._preempt(self.running[-1])
            self._admit_waiting(draft)
        encode = self._shown(draft)
        released = self.features.take_evicted()
        swap_out, swap_in = self.swap.take_moves()
        plan = StepPlan(
            draft.chunks, draft.copies, self._blocks_to_poison(), encode, released, swap_out=swap_out, swap_in=swap_in
        )
        if self.residency is None:
            return plan
        draft.chunks.sort(key=lambda chunk: chunk.adapters)  # one segment for each
        doomed = [request for request, _ in self.failed]
        for sequence in islice(self.waiting, _READ_AHEAD):
            if sequence.request not in doomed:
                self.residency.prefetch(sequence.request.adapters)
        self.residency.settle()
        installed, dropped = self.residency.take_changes()
        return replace(plan, drop=dropped, install=installed)

    def _continue_running(self, draft: PlanBuilder) -> None:
        for sequence in list(self.running):
            if draft.full:
                break
            if sequence.expects_last:
                continue
            count = min(sequence.num_uncomputed, draft.tokens_left)
            if sequence.running and count:
                count = self._see(sequence, sequence.num_computed, count, draft)
            if sequence.running and count and self._reserve(sequence, count, draft):
                self._schedule(sequence, count, draft)

    def _admit_waiting(self, draft: PlanBuilder) -> None:
        place = 0
        draft.blocked.clear()
        while place < min(len(self.waiting), _LOOK_AHEAD) and not draft.full:
            sequence = self.waiting[place]
            if sequence.pending is not None:  # a beam that has its result and waits for its siblings'
                place += 1
                continue
            if not self._hold_adapters(sequence, draft):
                place += 1
                continue
            found = self._find_prefix(sequence)
            revived = sum(self.pool.references(block) == 0 for block in found)
            # The whole sequence must fit, not only its first chunk: else it would be preempted half-way.
            if self.pool.blocks_for(len(sequence.token_ids)) - len(found) + revived > self.pool.num_free:
                self._release_adapters(sequence)
                break
            start = max(len(found) * self.pool.block_size, self.swap.tokens_of(sequence))
            count = self._see(sequence, start, min(len(sequence.token_ids) - start, draft.tokens_left), draft)
            if not count:
                self._release_adapters(sequence)
                break
            if sequence.request.adapters:
                for blocked in draft.blocked:
                    blocked.passed_by += 1
            del self.waiting[place]
            self._admit(sequence, found, start, count, draft)

    def _admit(self, sequence: SequenceState, found: list[int], start: int, count: int, draft: PlanBuilder) -> None:
        self.pool.share(found)
        missing = self.pool.blocks_for(start + count) - len(found)
        sequence.block_ids = found + self.pool.allocate(missing)
        sequence.num_computed = start
        self.swap.fetch(sequence, len(found))
        self._publish_fetched(sequence, len(found))
        self.prefix_queries += len(sequence.token_ids) if self.pool.index is not None else 0
        self.prefix_hits += len(found) * self.pool.block_size
        sequence.running = True
        insort(self.running, sequence, key=lambda s: s.order)
        for media in sequence.request.media_in(0, sequence.num_computed):
            if media.item.end <= sequence.num_computed:
                media.pixels = None  # it need not be encoded
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
            metrics.time_in_queue = metrics.first_scheduled_time - metrics.arrival_time
            self.times.queued.append(metrics.time_in_queue)
            metrics.num_cached_tokens = sequence.num_computed
            self.prompt_tokens += len(sequence.request.prompt_ids)
        self._schedule(sequence, count, draft)

    def _hold_adapters(self, sequence: SequenceState, draft: PlanBuilder) -> bool:
        """Hold a waiting sequence's adapters; False: it waits for them, or must not pass one that has waited long."""
        if self.residency is None or not sequence.request.adapters:
            return True
        request = sequence.request
        if len(draft.blocked) >= 2 * self.config.max_num_seqs:
            return False
        patient = all(other.passed_by < self.config.max_num_seqs for other in draft.blocked)
        if patient and self.residency.hold(request.adapters, urgent=not draft.blocked):
            return True
        error = self.residency.failure(request.adapters)
        if error is not None:
            self.failed.append((request, error))
        draft.blocked.append(sequence)
        return False

    def _release_adapters(self, sequence: SequenceState) -> None:
        if self.residency is not None and sequence.request.adapters:
            self.residency.release(sequence.request.adapters)

    def _see(self, sequence: SequenceState, start: int, count: int, draft: PlanBuilder) -> int:
        """How many of the next `count` tokens can be computed: those before the first image that is not ready.

        The features of the images among them are held from here on, and encoded in this step if they must be.
        """
        for media in sequence.request.media_in(start, start + count):
            digest = media.item.digest
            if digest in sequence.held:
                if all(image.digest != digest for image in draft.encode):
                    media.pixels = None
            elif self._hold(sequence.request, media, draft):
                sequence.held.append(digest)
            else:
                draft.waits = True
                return max(0, media.item.offset - start)
        return count

    def _hold(self, request: Request, media: MediaInput, draft: PlanBuilder) -> bool:
        """Hold an image's features; False: not in this step."""
        item = media.item
        if self.features.hold(item.digest):
            media.pixels = None
            return True
        if media.pixels is None:
            if not media.wanted:
                media.wanted = True
                self.wanted.append((request, media))
            return False
        # One image at least; no more than as many tokens as a step has, lest others wait too long for theirs.
        planned = sum(one.length for one in draft.encode)
        if draft.encode and planned + item.features > self.config.max_num_batched_tokens:
            return False
        if not self.features.insert(item.digest, item.features * self.feature_bytes):
            return False
        owner = tuple((ref.uid, weight) for ref, weight in request.adapters if ref.visual)
        draft.encode.append(EncodeImage(item.digest, item.features, media.pixels.inputs, owner))
        return True

    def _shown(self, draft: PlanBuilder) -> list[EncodeImage]:
        """The images to encode: not those for a sequence that saw them and then got no blocks."""
        if not draft.encode:
            return []
        shown = {item.digest for chunk in draft.chunks for item in chunk.media}
        for image in draft.encode:
            if image.digest not in shown:
                self.features.discard(image.digest)
        return [image for image in draft.encode if image.digest in shown]

    def _let_go(self, sequence: SequenceState, computed: int) -> None:
        """Release the features of all images but one that is computed half-way.

        Not even those that come again: holding them, the sequence might wait for room that it takes itself.
        """
        if sequence.held:
            items = [media.item for media in sequence.request.media]
            needed = {item.digest for item in items if item.offset < computed < item.end}
            for digest in [one for one in sequence.held if one not in needed]:
                self.features.release(digest)
                sequence.held.remove(digest)

    def forget_features(self, digests: Iterable[bytes]) -> None:
        """The runner has none of these after all: encoding them has failed."""
        for digest in digests:
            self.features.discard(digest)
            for sequence in self._live.values():
                if digest in sequence.held:
                    sequence.held.remove(digest)

    def _find_prefix(self, sequence: SequenceState) -> list[int]:
        """Cached blocks that a sequence can start from; at least one of its tokens is left to compute."""
        if self.pool.index is None:
            return []
        request = sequence.request
        limit = len(sequence.token_ids) - 1
        if request.scores_prompt:
            limit = min(limit, len(request.prompt_scores) - 1)  # a score needs its token's forward pass
        self._extend_keys(sequence, limit)
        return self.pool.index.find(sequence.keys[: limit // self.pool.block_size])

    def _reserve(self, sequence: SequenceState, count: int, draft: PlanBuilder) -> bool:
        """Get blocks of its own for the next `count` tokens, preempting the newest until there are enough.

        False: the sequence was itself the newest and had to go.
        """
        while True:
            shared = self._next_slot_is_shared(sequence)
            missing = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.block_ids)
            if missing + shared <= self.pool.num_free:
                break
            victim = self.running[-1]
            self._preempt(victim)
            draft.preempted = True
            if victim is sequence:
                return False
        if shared:
            self._copy_on_write(sequence, draft)
        sequence.block_ids += self.pool.allocate(missing)
        return True

    def _next_slot_is_shared(self, sequence: SequenceState) -> bool:
        place, offset = divmod(sequence.num_computed, self.pool.block_size)
        return offset > 0 and self.pool.references(sequence.block_ids[place]) > 1

    def _copy_on_write(self, sequence: SequenceState, draft: PlanBuilder) -> None:
        place = sequence.num_computed // self.pool.block_size
        original = sequence.block_ids[place]
        (copy,) = self.pool.allocate(1)
        self.pool.release([original])
        sequence.block_ids[place] = copy
        draft.copies.append((original, copy))

    def _schedule(self, sequence: SequenceState, count: int, draft: PlanBuilder) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        draft.tokens_left -= count
        draft.sequences_left -= 1
        draft.chunks.append(
            Chunk(
                sequence_id=sequence.id,
                token_ids=sequence.token_ids[start:end],
                start=start,
                block_ids=sequence.block_ids,
                prompt_len=len(sequence.request.prompt_ids),
                draws=sequence.draws() if end == len(sequence.token_ids) else (),
                score=_prompt_score(sequence.request, start, end),
                media=[media.item for media in sequence.request.media_in(start, end)],
                rotary=sequence.request.rotary_of(start, end),
                adapters=sequence.request.owner,
            )
        )

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's blocks. What they hold goes to main memory, or is computed anew, but for what the prefix
        index still knows."""
        self.num_preemptions += 1
        self.num_swaps += self.swap.save(sequence)
        sequence.request.metrics.num_preemptions += 1
        self._leave(sequence)
        self._queue(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.block_ids)
        self._let_go(sequence, len(sequence.token_ids))
        self._release_adapters(sequence)
        sequence.running = False
        sequence.block_ids = []
        sequence.num_computed = 0

    def _queue(self, sequence: SequenceState) -> None:
        if not self.waiting or self.waiting[-1].order < sequence.order:
            self.waiting.append(sequence)
        else:
            place = next(i for i, other in enumerate(self.waiting) if sequence.order < other.order)
            self.waiting.insert(place, sequence)

    def _blocks_to_poison(self) -> list[int]:
        if self.pool.freed is None:
            return []
        blocks = {b for b in self.pool.freed if self.pool.references(b) == 0}
        self.pool.freed.clear()
        return sorted(b for b in blocks if self.pool.index is None or not self.pool.index.holds(b))

    # -- commit -------------------------------------------------------------------------------------------------

    def advance_early(self, plan: StepPlan) -> None:
        """Take a plan that runs for done, so that the next can be made before its tokens are known.

        For plans in which each sequence draws one token at most and nothing is scored.
        """
        self._count(plan)
        self._ahead = plan
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is not None and chunk.draws:
                sequence.append_pending()

    def abandon(self, plan: StepPlan) -> None:
        """The plan that was counted ahead will never be committed; its requests end."""
        if plan is self._ahead:
            self._ahead = None

    def as_known(self, chunk: Chunk) -> Chunk | None:
        """A chunk with the tokens that are known by now; None when its sequence has ended."""
        sequence = self._live.get(chunk.sequence_id)
        if sequence is None or PENDING_TOKEN not in chunk.token_ids:
            return chunk if sequence is not None else None
        return replace(chunk, token_ids=sequence.token_ids[chunk.start : chunk.start + len(chunk.token_ids)])

    def _count(self, plan: StepPlan) -> None:
        """The plan's tokens are computed, or will be before whatever is planned from here on."""
        encoded = {one.digest for one in plan.encode}
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.num_computed += len(chunk.token_ids)
            if chunk.media:
                self._let_go(sequence, sequence.num_computed)
                for media in sequence.request.media:
                    if media.item.digest in encoded:
                        media.pixels = None

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceState]:
        """Record what a step computed; return the sequences that have a new token or have finished."""
        if plan is self._ahead:
            self._ahead = None
        else:
            self._count(plan)
        advanced: list[SequenceState] = []
        now = time.monotonic()
        for chunk, sampled, scores in zip(plan.chunks, result.sampled, result.scores, strict=True):
            sequence = self._live.get(chunk.sequence_id)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.request.prompt_scores.extend(scores)
            self._publish(sequence, chunk)
            if not sampled:
                continue
            self._stamp(sequence, now)
            self.generated_tokens += len(sampled)
            if sequence.request.beam is not None:
                advanced += self._take_candidates(sequence, sampled[0])
                continue
            branches = [sequence, *(self._fork(sequence, i) for i in range(1, len(sampled)))]
            for branch, token in zip(branches, sampled, strict=True):
                branch.append(token)
            advanced += branches
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self.finish(sequence, sequence.finish_reason)
        return advanced

    def _stamp(self, sequence: SequenceState, now: float) -> None:
        metrics = sequence.request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self.times.first_tokens.append(now - metrics.arrival_time)
        metrics.last_token_time = now
        if sequence.token_time is not None:
            self.times.gaps.append(now - sequence.token_time)
        sequence.token_time = now

    def _fork(self, parent: SequenceState, index: int) -> SequenceState:
        """Branch off a sequence that shares all of its parent's blocks until one of the two writes."""
        child = parent.fork(index)
        parent.request.sequences.append(child)
        self._live[child.id] = child
        if parent.running:
            self.pool.share(parent.block_ids)
            child.block_ids = list(parent.block_ids)
            child.num_computed = parent.num_computed
            if self.residency is not None and child.request.adapters:
                self.residency.hold(child.request.adapters)
            child.running = True
            insort(self.running, child, key=lambda s: s.order)
        else:
            self._queue(child)
        return child

    def _take_candidates(self, beam: SequenceState, sampled: Sampled) -> list[SequenceState]:
        """Keep a beam's candidates until its siblings have theirs too. An error ends the whole search."""
        beams = beam.request.sequences
        if sampled.error is not None:
            beam.request.failure = sampled.error
            for sibling in beams:
                self.finish(sibling, "error")
            return beams
        beam.pending = sampled.logprobs
        return [] if any(b.pending is None for b in beams) else self._advance_beams(beam.request)

    def _advance_beams(self, request: Request) -> list[SequenceState]:
        """All beams have their candidates: keep the best and drop the rest."""
        assert request.beam is not None
        beams = list(request.sequences)
        kept = request.beam.choose(beams)
        parents_used: set[int] = set()
        branches = []
        for candidate in kept:
            branch = parent = beams[candidate.parent]
            if parent.id in parents_used:
                branch = self._fork(parent, max(s.index for s in request.sequences) + 1)
            branches.append(branch)
            parents_used.add(parent.id)
        for branch, candidate in zip(branches, kept, strict=True):
            branch.append_candidate(candidate)
        for beam in beams:
            if beam.id not in parents_used:
                self.finish(beam, "stop")
        request.sequences = branches or beams  # a long search must not remember every beam it ever had
        return request.sequences

    def _publish(self, sequence: SequenceState, chunk: Chunk) -> None:
        """Make the blocks findable that a chunk has filled."""
        index, size = self.pool.index, self.pool.block_size
        if index is None or not sequence.running:  # preempted since: the blocks are no longer its own
            return
        end = chunk.start + len(chunk.token_ids)
        self._extend_keys(sequence, end)
        for place in range(chunk.start // size, end // size):
            index.publish(sequence.keys[place], sequence.block_ids[place])

    def _publish_fetched(self, sequence: SequenceState, first: int) -> None:
        """Make the full blocks findable that come back from main memory: they are there before any chunk reads."""
        if self.pool.index is not None:
            self._extend_keys(sequence, sequence.num_computed)
            for place in range(first, sequence.num_computed // self.pool.block_size):
                self.pool.index.publish(sequence.keys[place], sequence.block_ids[place])

    def _extend_keys(self, sequence: SequenceState, tokens: int) -> None:
        """Compute the prefix keys of the full blocks among the first `tokens` tokens."""
        size = self.pool.block_size
        keys = sequence.keys
        for place in range(len(keys), tokens // size):
            parent = keys[-1] if keys else sequence.request.prefix_root
            start, end = place * size, (place + 1) * size
            media = [(m.item.digest, m.item.offset - start) for m in sequence.request.media_in(start, end)]
            keys.append(block_key(parent, sequence.token_ids[start:end], media))

    # -- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, sequences, pool and prefix index agree."""
        self.pool.check_integrity(s.block_ids for s in self.running)
        self.swap.check_integrity(self.waiting)
        self.features.check_integrity(s.held for s in self._live.values())
        if self.residency is not None:
            self.residency.check_integrity(s.request.adapters for s in self.running)
        for sequence in self._live.values():
            home = self.running if sequence.running else self.waiting
            if sum(other is sequence for other in home) != 1:
                raise AssertionError(f"sequence {sequence.id} is not in its queue exactly once")
            if not sequence.running and (sequence.block_ids or sequence.num_computed or sequence.held):
                raise AssertionError(f"waiting sequence {sequence.id} holds blocks or features")
            if sequence.running and self.pool.blocks_for(sequence.num_computed) > len(sequence.block_ids):
                raise AssertionError(f"sequence {sequence.id} has computed tokens without a block")
        if len(self.running) + len(self.waiting) != len(self._live):
            raise AssertionError("a finished sequence is still queued")
        for queue in (self.running, self.waiting):
            if list(queue) != sorted(queue, key=lambda s: s.order):
                raise AssertionError("a queue is out of arrival order")

    def sequences(self) -> Iterator[SequenceState]:
        """All sequences that have not finished."""
        yield from self._live.values()


def _prompt_score(request: Request, start: int, end: int) -> PromptScore | None:
    """The score that a chunk of positions start..end owes: row p foretells prompt token p + 1."""
    if not request.scores_prompt:
        return None
    first = max(start, len(request.prompt_scores) - 1)
    targets = request.prompt_ids[first + 1 : end + 1]
    count = request.params.prompt_logprobs
    return PromptScore(first - start, targets, count or 0) if targets else None
