"""All settings of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.config import convert
from quire.config.lora import LoRAConfig
from quire.config.media import MediaConfig
from quire.config.model import ModelConfig
from quire.config.setting import LLM_ONLY, Checked, Group, setting
from quire.config.steps import CacheConfig, SchedulerConfig


@dataclass(frozen=True)
class EngineConfig(Checked):
    """All of it: what `LLMEngine` and `AsyncEngine` are made with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    seed: int | None = setting(
        None,
        "Makes requests without a seed repeatable.",
        more="None takes the system's entropy.",
        group=Group.CHAT,
        vllm=True,
    )
    max_logprobs: int = setting(
        20, "Most logprobs of a request.", more="-1 lifts the limit.", group=Group.CHAT, at_least=-1, vllm=True
    )
    logits_processors: tuple[str | type, ...] = setting(
        (),
        "Logits processors of other packages: module:Class, or the name of an installed one.",
        more="Requests give them arguments by `extra_args`, over HTTP `vllm_xargs`; see docs/logits-processors.md. "
        "In Python it may be the class, too.",
        group=Group.CHAT,
        metavar="NAME",
        takes=Sequence[Any],
        convert=convert.processors,
        vllm=True,
    )
    executor: str = setting(
        "in_process",
        "Where steps are computed: in this process, or in one of its own.",
        more="The answers are the same. With `process`, a worker that dies takes no engine with it; what plug-ins "
        "register by a call, and not by an entry point, it does not know.",
        group=Group.STEPS,
        choices=("in_process", "process"),
    )
    tensor_parallel_size: int = setting(
        1,
        "Processes that compute the model together, each its rows of every matrix.",
        more="On a CPU: each has some of the processors, those of one NUMA node where there are several. On GPUs: each "
        "has one, or shares one where there are fewer. The answers are the same, bit for bit. See docs/scale.md.",
        group=Group.STEPS,
        at_least=1,
        metavar="N",
        flags=("-tp",),
        vllm=True,
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages that compute the model one after the other, each some of its layers.",
        more="Each is a process, or tensor_parallel_size of them, and has its layers' weights and its part of every KV "
        "block; while one computes, the others have other sequences. The answers are the same, bit for bit. See "
        "docs/scale.md.",
        group=Group.STEPS,
        at_least=1,
        metavar="N",
        flags=("-pp",),
        vllm=True,
    )
    distributed_executor_backend: str | None = setting(
        None,
        "Who starts the processes of tensor_parallel_size and pipeline_parallel_size: quire, on this machine (mp), or "
        "Ray, on its nodes (ray).",
        more="uni: there is one process. With ray, one process is an actor of Ray's, too; what it needs comes by "
        "`pip install quire-llm[ray]`. The answers are the same, bit for bit. See docs/scale.md.",
        group=Group.STEPS,
        choices=("mp", "ray", "uni"),
        shown="mp where there are several",
        vllm=True,
    )
    ray_worker_cpus: int | None = setting(
        None,
        "CPUs, and threads, of each of Ray's workers.",
        more="Where all of them fit one node they share it.",
        group=Group.STEPS,
        at_least=1,
        shown="this process's threads, shared out",
    )
    debug: bool = setting(
        False,
        "Check every table after each step and poison freed blocks with NaN.",
        more="Slow; for tests and bug hunts.",
        group=Group.DEBUG,
        doors=LLM_ONLY,
    )
