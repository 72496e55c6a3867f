"""LoRA adapters."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import convert
from quire.config.setting import LLM_ONLY, NOWHERE, Checked, Group, Kind, setting

_LORA = Group.LORA


@dataclass(frozen=True)
class LoRAConfig(Checked):
    """How many adapters, of which size, from where. On a CPU the device's are the main memory's, not a copy."""

    enabled: bool = setting(False, "Serve LoRA adapters.", group=_LORA, name="enable_lora", vllm=True)
    max_loras: int | None = setting(
        None, "Most adapters that steps can use.", more="None sets no limit.", group=_LORA, at_least=1, vllm=True
    )
    max_cpu_loras: int | None = setting(
        None, "Most adapters in main memory.", more="None sets no limit.", group=_LORA, at_least=1, vllm=True
    )
    max_lora_rank: int | None = setting(
        None, "A larger rank is refused.", more="None takes any.", group=_LORA, at_least=1, vllm=True
    )
    device_bytes: int = setting(
        2 << 30,
        "Memory for adapters that steps can use.",
        group=_LORA,
        name="lora_device_bytes",
        kind=Kind.SIZE,
        at_least=1,
    )
    host_bytes: int = setting(
        4 << 30, "Memory for adapters in main memory.", group=_LORA, name="lora_host_bytes", kind=Kind.SIZE, at_least=1
    )
    roots: tuple[str, ...] | None = setting(
        None,
        "The folders that adapters may be read from, links resolved; None allows all, and hub ids.",
        group=_LORA,
        doors=LLM_ONLY,
        name="lora_roots",
        takes=Sequence[str],
        convert=convert.folders,
    )
    workers: int = setting(
        2,
        "Adapters that are read at once.",
        more="Each takes a few times its file's size meanwhile, beside the budget.",
        group=_LORA,
        doors=NOWHERE,
        at_least=1,
    )
