"""A contender of `benchmarks/cpu.py` in a process, and an environment, of its own.

It reads a line of JSON for each run, {"case": ..., "requests": [[token ids, output tokens], ...]}, and answers with
{"seconds": ...}; its first line is {"seconds": ...} too, for its start. What its libraries print goes to stderr.
Only the standard library is needed here: peers' environments have no quire.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Requests = list  # of [token ids, output tokens]
Run = Callable[[str, Requests], None]


def serve(start: Callable[[], Run]) -> None:
    """start: loads the model and returns what runs a case's requests to their ends, greedily, past end tokens."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begin = time.perf_counter()
    run = start()
    print(json.dumps({"seconds": time.perf_counter() - begin}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        run(job["case"], job["requests"])
        print(json.dumps({"seconds": time.perf_counter() - begin}), file=answers)
