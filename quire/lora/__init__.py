"""LoRA adapters: read and checked, kept in memory within budgets, and put into the layers that they change."""

from quire.lora.adapter import WEIGHTS_FILE, Adapter, AdapterReader
from quire.lora.bank import AdapterBank, Owner, capacity_for
from quire.lora.library import AdapterLibrary
from quire.lora.memory import AdapterInfo, LoadReport
from quire.lora.peft_config import CONFIG_FILE
from quire.lora.request import LoRARequest
from quire.lora.residency import Residency

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "Adapter",
    "AdapterBank",
    "AdapterInfo",
    "AdapterLibrary",
    "AdapterReader",
    "LoRARequest",
    "LoadReport",
    "Owner",
    "Residency",
    "capacity_for",
]
