"""What is done to a row of logits before a token is drawn from it: quire's own rules, and plug-ins."""

from __future__ import annotations

from quire.platform.sampling.logits_processors.base import BitMask, LogitsProcessor, ProcessorRequest, TokenMask
from quire.platform.sampling.logits_processors.chain import build_chain
from quire.platform.sampling.logits_processors.plugins import Plugin, check_arguments, check_beams, load_plugins

__all__ = [
    "BitMask",
    "LogitsProcessor",
    "Plugin",
    "ProcessorRequest",
    "TokenMask",
    "build_chain",
    "check_arguments",
    "check_beams",
    "load_plugins",
]
