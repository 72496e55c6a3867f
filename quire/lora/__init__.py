"""LoRA adapters: read and checked, kept in memory within budgets, and put into the layers that they change."""

from quire.lora.adapter import Adapter, AdapterReader
from quire.lora.device_budget import DeviceAdapterBudget
from quire.lora.files import WEIGHTS_FILE
from quire.lora.memory import AdapterInfo, LoadReport, StagedAdapter
from quire.lora.peft_config import CONFIG_FILE
from quire.lora.registry import AdapterRegistry
from quire.lora.request import LoRARequest, name_fault
from quire.lora.slots import AdapterMix, AdapterSlots, capacity_for

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "Adapter",
    "AdapterInfo",
    "AdapterMix",
    "AdapterReader",
    "AdapterRegistry",
    "AdapterSlots",
    "DeviceAdapterBudget",
    "LoRARequest",
    "LoadReport",
    "StagedAdapter",
    "capacity_for",
    "name_fault",
]
