"""What vLLM has and quire has not, with the way out, for who asks for it by its name."""

from __future__ import annotations

_WORKERS = "one process computes, and no code is sent to it; llm_engine is the engine itself"
_PLUGIN = "a model is added by a plug-in package: see docs/adding-a-model.md"

_OF_LLM = {
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), "py-spy or torch.profiler can be run on the program"),
    **dict.fromkeys(("enqueue", "wait_for_completion", "enqueue_chat"), "use llm_engine.add_request() and step()"),
    "set_tokenizer": "name it when the LLM is made, as tokenizer=...",
    "get_world_size": "one process computes, on one device",
}
_OF_QUIRE = {
    "initialize_ray_cluster": _WORKERS,
    "ModelRegistry": _PLUGIN,
    "ExplicitEncoderDecoderPrompt": "models with an encoder for text are not served",
}


def method_not_served(name: str) -> str:
    """Of a method of vLLM's LLM: ": why"; a full stop for what is none."""
    return f": {_OF_LLM[name]}." if name in _OF_LLM else "."


def name_not_served(name: str) -> str:
    """The same of what `vllm` itself has."""
    return f": {_OF_QUIRE[name]}." if name in _OF_QUIRE else ""
