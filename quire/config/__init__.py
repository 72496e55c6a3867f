"""Settings: frozen, checked when made.

Each stands in one row, where its field is declared: `model.py`, `steps.py`, `media.py`, `lora.py`, `engine.py`,
`server.py`, `start.py`. `settings.py` has the whole table, `setting.py` says what a row can say.

Importing this is cheap.
"""

from quire.config.engine import EngineConfig
from quire.config.lora import LoRAConfig
from quire.config.media import MediaConfig
from quire.config.model import ModelConfig
from quire.config.server import ServerConfig
from quire.config.start import LaunchConfig, RequestDefaults
from quire.config.steps import CacheConfig, SchedulerConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "LaunchConfig",
    "LoRAConfig",
    "MediaConfig",
    "ModelConfig",
    "RequestDefaults",
    "SchedulerConfig",
    "ServerConfig",
]
