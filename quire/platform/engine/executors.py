"""Who computes an engine's steps: this process, another one, several, or actors of Ray's."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.platform.execution.executor import Executor
from quire.platform.execution.in_process import InProcessExecutor


def executor_for(config: EngineConfig, path: Path) -> Executor:
    """Start who computes the steps. Raises QuireError for settings that do not go together, and what it raises."""
    _check_executor(config)
    if config.distributed_executor_backend == "ray":
        from quire.platform.execution.ray_executor import ray_executor

        return ray_executor(config, path)
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        from quire.platform.execution.sharded import several_processes

        return several_processes(config, path)
    if config.executor == "process":
        from quire.platform.execution.process import ProcessExecutor

        return ProcessExecutor(config, path)
    return InProcessExecutor(config, path)


def _check_executor(config: EngineConfig) -> None:
    """Raise QuireError for settings that contradict each other."""
    backend = config.distributed_executor_backend
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if backend == "uni" and getattr(config, name) > 1:
            raise QuireError(
                f"distributed_executor_backend='uni' and {name}={getattr(config, name)}: take 'mp' or 'ray'."
            )
    if backend == "ray" and config.executor == "process":
        raise QuireError("distributed_executor_backend='ray' and executor='process': leave one of them out.")
    if backend != "ray" and config.ray_worker_cpus is not None:
        raise QuireError("ray_worker_cpus: is for distributed_executor_backend='ray'; leave it out.")
