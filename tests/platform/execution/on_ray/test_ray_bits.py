"""Workers that are Ray's actors: the same bits, on one node and on two."""

from __future__ import annotations

import pytest

from tests.platform.execution.executors.test_executors_bits import (
    test_adapters,
    test_an_adapter_that_is_unloaded_leaves_the_worker_too,
    test_forks_and_beams,
    test_one_request_fails_in_the_worker,
    test_prompts_as_embeddings,
    test_sleep,
    test_stop_strings_and_aborts,
    test_the_promise,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]

__all__ = [
    "test_adapters",
    "test_an_adapter_that_is_unloaded_leaves_the_worker_too",
    "test_forks_and_beams",
    "test_one_request_fails_in_the_worker",
    "test_prompts_as_embeddings",
    "test_sleep",
    "test_stop_strings_and_aborts",
    "test_the_promise",
]  # with the fixtures of this folder
