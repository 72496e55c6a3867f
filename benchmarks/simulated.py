"""A replica for `simulate.py`: quire's own scheduler, block pool and account of adapters, in virtual time.

What is modelled is what computes: how long a step takes, and how long an adapter takes to come. What is decided (who
runs, in which chunks, with which blocks and adapters, who waits and who is preempted) the engine's own code decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, Literal

from quire.config import LoRAConfig, SchedulerConfig
from quire.lora import DeviceAdapterBudget
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex, root_key
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Sampled
from quire.platform.scheduling.plan import StepPlan, StepResult
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler
from quire.types import AdapterRef

_TOKEN = (Sampled(5),)


@dataclass(frozen=True)
class Profile:
    """A machine and a model, in seconds and bytes.

    step: of a step in any case; row: of each sequence in it; token: of each token beyond a sequence's first; key: of
    each token that some sequence attends to. adapters, adapter: of a step with any, and of each; install: to put one on
    the device; fetch: to read one, `workers` at once. device, host: how many adapters have room. blocks: of
    `block_size` tokens. max_num_seqs, max_num_batched_tokens: the scheduler's.
    """

    step: float
    row: float
    token: float
    key: float
    adapters: float
    adapter: float
    install: float
    fetch: float
    workers: int
    device: int
    host: int
    blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512


# One H100, a Llama 3 8B in bf16, of the figures of docs/gpu.md. 158 tokens a second of one stream make 6.3 ms a step.
# 64 streams of 512 + 256 tokens took 5.11 s: products of many tokens ran at a quarter of 806 TFLOP/s, 16 GFLOP a token,
# so that 2.6 s were prompts' (64 steps of 512 tokens each) and 9.8 ms each decode step's; of these, keys and values
# (128 KB a token, 640 tokens a stream) are 1.8 ms at 3 TB/s. Steps with 1, 8 and 64 adapters of rank 16 took 1 / 0.85,
# 1 / 0.83 and 1 / 0.65 as long. Assumed, not measured: an adapter has 84 MB; 25 GB/s to the device; 0.1 s from a
# store, two at once; 20 GB and 100 GB of memory for them.
H100 = Profile(
    step=6.2e-3, row=2.9e-5, token=6.7e-5, key=4.4e-8, adapters=1.7e-3, adapter=5.6e-5, install=3.4e-3, fetch=0.1,
    workers=2, device=240, host=1200, blocks=20_000,
)  # fmt: skip


class AdapterTiers:
    """As the engine's registry, what `DeviceAdapterBudget` asks of it: adapters that come into main memory in virtual
    time, and go from it, the least recently used first.

    now: the time. gone: those that have left memory since it was emptied.
    """

    def __init__(self, profile: Profile) -> None:
        self.now = 0.0
        self.gone: list[int] = []
        self._profile = profile
        self._ready: OrderedDict[int, float] = OrderedDict()  # in memory from then on
        self._claimed: set[int] = set()  # on the device
        self._free_at = [0.0] * profile.workers

    def fetch(self, uid: int, urgent: bool) -> Literal["ready", "coming", "no room", "failed"]:
        ready = self._ready.get(uid)
        if ready is not None:
            self._ready.move_to_end(uid)
            return "ready" if ready <= self.now else "coming"
        if len(self._ready) >= self._profile.host:
            old = next((one for one, at in self._ready.items() if one not in self._claimed and at <= self.now), None)
            if old is None:
                return "no room"
            del self._ready[old]
            self.gone.append(old)
        done = max(self._free_at[0], self.now) + self._profile.fetch
        heapreplace(self._free_at, done)
        self._ready[uid] = done
        return "ready" if done <= self.now else "coming"

    def next_ready(self) -> float | None:
        """When the next one comes; None: none is on its way."""
        return min((at for at in self._ready.values() if at > self.now), default=None)

    def claim(self, uid: int) -> bool:
        if self._ready.get(uid, float("inf")) > self.now:
            return False
        self._claimed.add(uid)
        return True

    def unclaim(self, uids: Iterable[int]) -> None:
        self._claimed.difference_update(uids)

    def size(self, uid: int) -> int:
        return 1

    def has(self, uid: int) -> bool:
        return True

    def is_pinned(self, uid: int) -> bool:
        return False

    def error(self, uid: int) -> None:
        return None

    def drained(self) -> list[int]:
        return []


def reference(adapter: int) -> AdapterRef:
    """Of the adapter of a number."""
    return AdapterRef(str(adapter), adapter, adapter.to_bytes(32, "big"), False)


def make_request(number: int, prompt: list[int], answer: int, adapter: int | None) -> Request:
    """A request of so many tokens out. adapter: its number; None: the base model."""
    use = () if adapter is None else ((reference(adapter), 1.0),)
    return Request(
        request_id=str(number), prompt=None, prompt_ids=prompt, params=_PARAMS, max_tokens=answer, seeds=(0,),
        eos_ids=frozenset(), stop_ids=frozenset(), prefix_root=root_key(adapters=use), adapters=use,
    )  # fmt: skip


_PARAMS = SamplingParams(temperature=0.0)


class Replica:
    """One engine. Whoever drives it calls `begin`, and `finish` when the step's time is over."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tiers = AdapterTiers(profile)
        self.kv = KVManager(BlockPool(profile.blocks, profile.block_size, PrefixIndex()))
        lora = LoRAConfig(enabled=True, device_bytes=profile.device, host_bytes=profile.device)  # each weighs 1
        registry: Any = self.tiers
        self.budget = DeviceAdapterBudget(lora, registry)
        config = SchedulerConfig(
            max_num_seqs=profile.max_num_seqs, max_num_batched_tokens=profile.max_num_batched_tokens
        )
        self.scheduler = Scheduler(config, self.kv, adapters=self.budget)
        self.plan: StepPlan | None = None
        self._adapters: dict[int, int] = {}  # of sequences that the steps know

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def begin(self, now: float) -> float | None:
        """Plan a step at this time; returns when it ends. None: there is nothing to compute; ask `next_ready`."""
        self.tiers.now = now
        plan = self.scheduler.plan()
        self.scheduler.delivered(plan)
        self.tiers.unclaim(plan.drop)
        for new in plan.new:
            if new.adapters:
                self._adapters[new.sequence_id] = new.adapters[0][0]
        for ended in plan.ended:
            self._adapters.pop(ended, None)
        if not plan.chunks:
            return None
        self.plan = plan
        return now + self.seconds(plan)

    def seconds(self, plan: StepPlan) -> float:
        """How long a step takes."""
        profile, rows = self.profile, len(plan.chunks)
        tokens = keys = 0
        for chunk in plan.chunks:
            tokens += chunk.length
            keys += chunk.start + chunk.length
        own = {self._adapters.get(chunk.sequence_id) for chunk in plan.chunks} - {None}
        seconds = profile.step + profile.row * rows + profile.token * (tokens - rows) + profile.key * keys
        if own:
            seconds += profile.adapters + profile.adapter * len(own)
        return seconds + profile.install * len(plan.install)

    def finish(self) -> list[Any]:
        """The step is over; returns the sequences that got a token."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        sampled = tuple(_TOKEN if chunk.draws else () for chunk in plan.chunks)
        return self.scheduler.commit(plan, StepResult(sampled, ((),) * len(plan.chunks)))
