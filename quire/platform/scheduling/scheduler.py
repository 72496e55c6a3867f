"""Who runs in the next step, and what each of them computes.

There is no prefill phase and no decode phase: every sequence has tokens, some of them computed, and each step lets
`num_computed` chase their number within one token budget. The rule of fairness is arrival order: the oldest sequence is
served first, admitted first and preempted last, so that some sequence always advances to its end.

The queue and the rules are here. Blocks are the `KVManager`'s, features of images the `EncoderBudget`'s, adapters the
`AdapterBudget`'s, which also says who may pass a sequence that waits for its adapter.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from quire.config import SchedulerConfig
from quire.lora import DeviceAdapterBudget
from quire.multimodal import FeatureCache
from quire.platform.kv.manager import KVManager
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.adapter_budget import AdapterBudget
from quire.platform.scheduling.beam_steps import Changes, take_candidates
from quire.platform.scheduling.drafted_steps import take_drafted
from quire.platform.scheduling.drafting import Drafting, Drafts
from quire.platform.scheduling.encoder_budget import EncoderBudget
from quire.platform.scheduling.flights import Flights
from quire.platform.scheduling.metrics import StepTimes
from quire.platform.scheduling.plan import Chunk, StepPlan, StepResult
from quire.platform.scheduling.plan_builder import PlanBuilder
from quire.platform.scheduling.pooled_steps import take_pooled
from quire.platform.scheduling.queues import check_queues, enqueue, reads, tokens_beside
from quire.platform.scheduling.request import FinishReason, Request, SequenceState
from quire.platform.scheduling.worker_view import WorkerView

_LOOK_AHEAD = 1024  # how far behind the first one a step looks for those that need not wait as it does


class Scheduler:
    """Owns the queue and the running sequences, and alone changes requests. It never touches a tensor.

    kv: the blocks. features: whose features the runner has; feature_bytes: of one placeholder's. For models that see.
    adapters: those that are on the device. drafting: proposes draft tokens; None: there are none. steps_at_once: that
    run at the same time, each of other sequences.
    running: sequences that hold blocks, oldest first. waiting: those that hold none, oldest first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        features: FeatureCache | None = None,
        feature_bytes: int = 0,
        adapters: DeviceAdapterBudget | None = None,
        drafting: Drafting | None = None,
        steps_at_once: int = 1,
    ) -> None:
        self.config = config
        self._steps_at_once = steps_at_once
        self.drafting, self.kv = drafting, kv
        features = FeatureCache(0) if features is None else features
        self.encoder = EncoderBudget(features, feature_bytes, config.max_num_batched_tokens)
        self.adapters = AdapterBudget(adapters, config.max_num_seqs)
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self.num_preemptions = self.num_swaps = 0  # the latter: of sequences that need not be computed again
        self.prompt_tokens = self.generated_tokens = 0  # the former: of requests that began to run
        self.times = StepTimes()  # of the last step
        self._most_at_once = kv.most_at_once  # tokens of a chunk
        self._live: dict[int, SequenceState] = {}
        self._flights = Flights()
        self._number = 0  # of the last plan
        self._worker = WorkerView()

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def sequences(self) -> Iterator[SequenceState]:
        """All sequences that have not finished."""
        yield from self._live.values()

    def add(self, request: Request) -> None:
        """Queue a new request. It has been checked that the pool can hold a sequence of it to its end."""
        sequence = request.begin()
        self._live[sequence.id] = sequence
        self.kv.open(sequence.id, request.prefix_root, [media.item for media in request.media], request.sees)
        enqueue(self.waiting, sequence)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End what goes on of a request."""
        for sequence in request.sequences:
            self.finish(sequence, reason)

    def fail(self, request: Request, failure: Failure) -> None:
        """End a request that cannot go on, or that could not begin."""
        request.fail(failure)
        if not request.sequences:
            request.begin().finish("error")
            request.end()
        self.end(request, "error")

    def request_of(self, sequence_id: int) -> Request | None:
        """The request of a sequence that has not finished."""
        sequence = self._live.get(sequence_id)
        return None if sequence is None else sequence.request

    def stop_at(self, sequence: SequenceState, stop: str, count: int | None = None) -> None:
        """End a sequence whose text has reached a stop string, whatever else may end it in the same step. count: the
        generated tokens that have led there; None: all."""
        before = len(sequence.output_ids)
        sequence.stop_at(stop, count)
        self.generated_tokens -= before - len(sequence.output_ids)
        self.finish(sequence, "stop")

    def finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        """End a sequence and give its blocks back; ending it twice does nothing."""
        sequence.finish(reason)
        if self._live.pop(sequence.id, None) is None:
            return
        if sequence.running:
            self._leave(sequence)
            sequence.leave()
        else:
            self.waiting.remove(sequence)
        self.kv.close(sequence.id)
        self._worker.end(sequence.id)
        if self.drafting is not None:
            self.drafting.end(sequence)
        if sequence.request.finished:
            sequence.request.end()

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the next step's chunks and give them blocks."""
        self.times.clear()
        self.kv.begin_plan()
        builder = PlanBuilder(self.config)
        builder.share_out(len(self.running), len(self.waiting), self._steps_at_once)
        self._worker.begin_plan(self._live, builder.chunks)
        self._continue_running(builder)
        if not builder.preempted:
            self._admit_waiting(builder)
        while not builder.chunks and not builder.waits and self.waiting and self.running and not self._flights:
            # Only beams run, and all wait for a sibling that waits for their blocks.
            self._preempt(self.running[-1])
            self._admit_waiting(builder)
        if builder.encode:
            builder.encode = self.encoder.used_encodes(builder)
        if self.adapters.device is not None:
            # Each adapter's rows in one segment.
            builder.chunks.sort(key=lambda chunk: self._live[chunk.sequence_id].request.adapter_mix)
            self.adapters.prefetch(self.waiting)
        builder.take_moves(self.kv)
        return self._build(builder)

    def plan_upkeep(self) -> StepPlan:
        """A plan without chunks, where no step will come."""
        builder = PlanBuilder(self.config)
        self._worker.begin_plan(self._live, builder.chunks)
        return self._build(builder)

    def _build(self, builder: PlanBuilder) -> StepPlan:
        self._number += 1
        builder.take_transfers(self.kv)
        released, changes = self.encoder.features.take_evicted(), self.adapters.settle()
        room = self.config.max_num_seqs - len(self.running)
        beside = self._steps_at_once > 1 and tokens_beside(self.waiting, room, self.kv)
        plan = builder.build(self._number, released, changes, self._worker.news(), beside)
        if self.drafting is not None:
            self.drafting.planned(plan, time.monotonic())
        return plan

    def delivered(self, plan: StepPlan) -> None:
        """The worker has taken in the last plan. Where one never reaches it, the next makes up for that."""
        self._worker.delivered(plan)

    def _add(self, sequence: SequenceState, count: int, builder: PlanBuilder, drafts: tuple[int, ...] = ()) -> None:
        if not sequence.worker_tokens:
            self.kv.forget_told(sequence.id)
        builder.add(sequence, count, self._worker.new_tokens(sequence), self.kv.new_blocks(sequence.id), drafts)

    def _continue_running(self, builder: PlanBuilder) -> None:
        drafts, owed = Drafts(), self._flights.owed
        # Those who wait come first, be it for tokens of the step or for blocks.
        if self.drafting is not None and not (self.waiting and len(self.running) < self.config.max_num_seqs):
            free = [one for one in self.running if one.id not in owed] if owed else self.running
            drafts = self.drafting.choose(free[: builder.sequences_left], builder.tokens_left)
        for sequence in list(self.running):
            if builder.full:
                break
            if (owed and sequence.id in owed) or (sequence.pending and sequence.last_pending):
                continue
            start = sequence.num_computed
            count = min(len(sequence.token_ids) - start, builder.tokens_left, self._most_at_once)
            if not sequence.running or not count:
                continue
            if sequence.request.media:
                count = self.encoder.schedule_images(sequence, start, count, builder)
            own = drafts.get(sequence.id, ())
            if own and count and self.kv.reserve(sequence.id, start, count + len(own)):
                self._add(sequence, count, builder, own)
            elif count and (self.kv.reserve(sequence.id, start, count) or self._reserve(sequence, count, builder)):
                self._add(sequence, count, builder)

    def _reserve(self, sequence: SequenceState, count: int, builder: PlanBuilder) -> bool:
        """Get blocks for the next `count` tokens, preempting the newest. False: that was itself, which had to go."""
        while not self.kv.reserve(sequence.id, sequence.num_computed, count):
            victim = self.running[-1]
            self._preempt(victim)
            builder.preempted = True
            if victim is sequence:
                return False
        return True

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        place = 0
        self.adapters.begin()
        while place < min(len(self.waiting), _LOOK_AHEAD) and not builder.full and builder.admits:
            sequence = self.waiting[place]
            # A beam that has its result waits for its siblings'; others for a step that runs, for blocks that are read,
            # or for their adapters.
            waits = sequence.candidates is not None or self._flights.names(sequence.id) or reads(sequence, self.kv)
            if waits or not self.adapters.acquire(sequence):
                place += 1
                continue
            found = self.kv.find_prefix(sequence.id, sequence.token_ids, sequence.most_cached)
            start = self.kv.start_of(sequence.id, found)
            count = 0
            # The whole sequence must fit, not only its first chunk: else it would be preempted half-way.
            if self.kv.fits(len(sequence.token_ids), found):
                count = min(len(sequence.token_ids) - start, builder.room_for(sequence), self._most_at_once)
                count = self.encoder.schedule_images(sequence, start, count, builder)
            if not count:
                self.adapters.release(sequence)
                break
            del self.waiting[place]
            self._admit(sequence, found, start, count)
            builder.admits -= 1
            self._add(sequence, count, builder)

    def _admit(self, sequence: SequenceState, found: list[int], start: int, count: int) -> None:
        self.kv.admit(sequence.id, sequence.token_ids, found, start, count)
        sequence.admit(start)
        insort(self.running, sequence, key=lambda s: s.order)
        self.adapters.admitted(sequence)
        self.encoder.admitted(sequence)
        queued = sequence.request.scheduled(time.monotonic(), start)
        if queued is not None:
            self.times.queued.append(queued)
            self.prompt_tokens += len(sequence.request.prompt_ids)

    def _preempt(self, sequence: SequenceState, keep: bool = True) -> None:
        """Take a sequence's blocks. What they hold goes to main memory, or is computed anew, but for what the prefix
        index still knows. keep: it is right."""
        self.num_preemptions += 1
        # Not of one that will have ended when the running step is done; nor of a held step, which may fail yet.
        keep = keep and not sequence.last_pending and not self._flights.names(sequence.id)
        self.num_swaps += self.kv.preempt(sequence.id, sequence.num_computed if keep else 0)
        self._leave(sequence)
        sequence.preempt()
        enqueue(self.waiting, sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self.encoder.release_features(sequence, len(sequence.token_ids))
        self.adapters.release(sequence)

    # -- commit ---------------------------------------------------------------------------------------------------

    def advance_early(self, plan: StepPlan) -> None:
        """Take a plan that runs for done, so that the next can be made before its tokens are known: one in which each
        sequence draws one token at most and nothing is scored."""
        self._advance(plan)
        self._flights.begin(plan)
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is not None and chunk.draws:
                sequence.append_pending()

    def hold(self, plan: StepPlan) -> None:
        """Take a plan that runs for done, so that the next ones can be made, of other sequences."""
        self._advance(plan)
        self._flights.hold(plan)

    def abandon(self, plan: StepPlan) -> None:
        """A plan that was counted as done will never be committed; its requests end, or begin again."""
        self._flights.end(plan)

    def begin_again(self, plan: StepPlan) -> None:
        """A plan that was counted as done has failed: its sequences are computed anew."""
        self.abandon(plan)
        self.encoder.forget((image.digest for image in plan.encode), self._live.values())
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is not None:
                sequence.drop_pending()
                self.kv.swap.drop(sequence.id)  # where it was preempted since, as if the step had been right
                if sequence.running:
                    self._preempt(sequence, keep=False)

    def alone(self, chunk: Chunk, plan: StepPlan) -> StepPlan | None:
        """A plan of one of a plan's chunks, with the tokens that are known by now and the images that it needs; None
        when its sequence has ended. For a plan that was delivered, and failed."""
        sequence = self._live.get(chunk.sequence_id)
        if sequence is None:
            return None
        shown = {media.item.digest for media in sequence.request.media_in(chunk.start, chunk.end)}
        return plan.alone(chunk, sequence.token_ids, shown)

    def _advance(self, plan: StepPlan) -> None:
        """The plan's tokens are computed, or will be before whatever is planned from here on."""
        self.encoder.pixels = {}
        encoded = {one.digest for one in plan.encode}
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.sequence_id)
            if sequence is None:  # aborted while the step ran
                continue
            sequence.advance(chunk.length - len(chunk.drafts))
            if sequence.request.media and sequence.request.media_in(chunk.start, chunk.end):
                self.encoder.encoded(sequence, encoded)

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceState]:
        """Record what a step computed; return the sequences that have a new token or have finished."""
        if not self._flights.end(plan):
            self._advance(plan)
        if result.pooled:
            return take_pooled(plan, result, self._live, self.kv, self.finish)
        advanced: list[SequenceState] = []
        now, size = time.monotonic(), self.kv.pool.block_size
        if self.drafting is not None:
            self.drafting.committed(plan, now)
        for chunk, sampled, scores in zip(plan.chunks, result.sampled, result.scores, strict=True):
            sequence = self._live.get(chunk.sequence_id)
            if sequence is None:  # aborted while the step ran
                continue
            if scores:
                sequence.request.take_scores(scores)
            if chunk.drafts:
                assert self.drafting is not None
                self.times.token(sequence.request.stamp(now), sequence.stamp(now))
                self.generated_tokens += take_drafted(sequence, chunk, sampled, self.drafting, self.kv)
                advanced.append(sequence)
                continue
            # Where it was preempted since, the blocks are no longer its own.
            if sequence.running and chunk.start % size + chunk.length >= size:
                self.kv.publish(sequence.id, sequence.token_ids, chunk.start, chunk.end)
            if not sampled:
                continue
            self.times.token(sequence.request.stamp(now), sequence.stamp(now))
            self.generated_tokens += len(sampled)
            if sequence.request.beam is not None:
                advanced += take_candidates(sequence, sampled[0], Changes(self.fail, self.finish, self._fork))
                continue
            branches = [sequence, *[self._fork(sequence, i) for i in range(1, len(sampled))]]
            for branch, token in zip(branches, sampled, strict=True):
                # Beside itself, those that are forced, of which some may be past its end.
                self.generated_tokens += max(0, branch.append(token) - 1)
            advanced += branches
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self.finish(sequence, sequence.finish_reason)
        return advanced

    def _fork(self, parent: SequenceState, index: int) -> SequenceState:
        """Branch off a sequence that shares all of its parent's blocks until one of the two writes."""
        child = parent.fork(index)
        self._live[child.id] = child
        self.kv.fork(parent.id, child.id)
        self._worker.fork(parent, child)
        if parent.running:
            self.adapters.share(child)
            child.admit(parent.num_computed)
            insort(self.running, child, key=lambda s: s.order)
        else:
            enqueue(self.waiting, child)
        return child

    # -- what the engine asks and tells ---------------------------------------------------------------------------

    def forget_features(self, digests: Iterable[bytes]) -> None:
        """The runner has none of these after all: encoding them has failed."""
        self.encoder.forget(digests, self._live.values())

    def forget_cached(self) -> None:
        """Forget which blocks hold which beginnings, and the features that nobody holds."""
        self.kv.forget_cached()
        self.encoder.features.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, sequences, blocks, features and adapters agree."""
        waiting = {s.id: len(s.token_ids) for s in self.waiting}
        self.kv.check_integrity({s.id: s.num_computed for s in self.running}, waiting)
        self.encoder.features.check_integrity(s.held for s in self._live.values())
        self.adapters.check_integrity(self.running)
        check_queues(self.running, self.waiting, self._live)
