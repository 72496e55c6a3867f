"""What is read once, when `LLM` or the server starts: requests' defaults, adapters to load, logs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import convert
from quire.config.setting import Checked, Door, Group, setting
from quire.errors import QuireError

GENERATION_FILE = "generation_config.json"
_CHAT, _LOGS = Group.CHAT, Group.LOGS
_PROGRAM: tuple[Door, ...] = ("LLM", "serve")  # vLLM's EngineArgs have no template


def _check_generation(given: Any) -> None:
    if given not in ("auto", "vllm") and not os.path.isfile(os.path.join(str(given), GENERATION_FILE)):
        raise QuireError(f"generation_config={given!r}: is auto, vllm or a folder that has {GENERATION_FILE}.")


@dataclass(frozen=True)
class RequestDefaults(Checked):
    """What holds where a request says nothing."""

    chat_template: str | None = setting(
        None,
        "A file with a Jinja template, or the template.",
        group=_CHAT,
        doors=_PROGRAM,
        takes=str | Path,
        convert=convert.load_chat_template,
        vllm=True,
    )
    tool_call_parser: str | None = setting(
        None,
        "How the model writes calls of tools: a format's name.",
        more="None: as the chat template tells, where that is certain.",
        group=_CHAT,
        doors=_PROGRAM,
        convert=convert.folder,
        vllm=True,
    )
    reasoning_parser: str | None = setting(
        None,
        'How the model sets its reasoning apart from the answer: a format\'s name, or "none".',
        more="None: as the chat template tells, where that is certain.",
        group=_CHAT,
        convert=convert.folder,
        vllm=True,
    )
    tool_strict: bool = setting(
        True,
        "Arguments of calls match their tools' schemas (the default).",
        more="A call that the model makes of its own accord too: from its opening tag on.",
        group=_CHAT,
        doors=_PROGRAM,
    )
    generation_config: str = setting(
        "auto",
        "auto: sampling as the checkpoint recommends; vllm: the API's defaults; or a folder with a "
        "generation_config.json.",
        group=_CHAT,
        check=_check_generation,
        vllm=True,
    )
    override_generation_config: Mapping[str, Any] = setting(
        {}, 'Defaults of sampling: {"temperature": 0.5}.', group=_CHAT, vllm=True
    )


@dataclass(frozen=True)
class LaunchConfig(Checked):
    """How `quire serve` starts: the adapters that it loads, and its logs."""

    modules: tuple[str, ...] = setting(
        (),
        "Adapters: name=path, or JSON with name, path, base_model_name.",
        group=Group.LORA,
        name="lora_modules",
        vllm=True,
    )
    log_format: str = setting("text", "Lines for people, or JSON.", group=_LOGS, choices=("text", "json"))
    log_level: str = setting(
        "info",
        "debug, info, warning or error.",
        group=_LOGS,
        choices=("debug", "info", "warning", "error"),
        vllm=True,
    )
    uvicorn_log_level: str | None = setting(
        None,
        "Of the lines about requests alone.",
        group=_LOGS,
        shown="--log-level's",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        vllm=True,
    )
    disable_access_log: bool = setting(
        False, "No line for each request.", group=_LOGS, vllm="disable_uvicorn_access_log"
    )
