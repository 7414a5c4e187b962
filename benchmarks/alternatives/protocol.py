"""The worker's side of benchmarks/compare.py: jobs on standard input, answers on standard output, one JSON object a line.

A worker runs in the environment of one alternative and offers one or several ways to decode. It first writes {"versions": {...}}, then
answers {"way", "ids", "max_tokens", "stop_ids"} with {"tokens", "seconds"}, the wall time of the whole call, prefill included. Knows no
alternative; imports the standard library only, so that any environment can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

Way = Callable[[list[int], int, list[int]], list[int]]
"""Prompt, most tokens to emit and stop ids (emitted too) to emitted tokens."""


def serve(ways: Mapping[str, Way], packages: list[str]) -> None:
    """Answer jobs until standard input ends; whatever the libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"versions": {name: version(name) for name in packages}}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        tokens = ways[job["way"]](job["ids"], job["max_tokens"], job["stop_ids"])
        seconds = time.perf_counter() - began
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)
