"""What a growing cache costs: the time of every plain step of a long output, and of the steps in which state grew.

    python benchmarks/growth.py BUNDLE --tokens 1200

A step in which rings and caches grow should take longer by one copy of them and by binding the graphs again, no more.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import machine
import numpy as np

from dspark.runtime.bundle import load_bundle
from dspark.runtime.decode import Decoder
from dspark.runtime.drafter import Drafter
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.request import Request
from dspark.runtime.state import Slots
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Qwen3Target


def main() -> None:
    """Print the median step, the steps with growth, and how long copying that state takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--speculative", action="store_true")
    args = parser.parse_args()
    engine, slots = OnnxRuntimeEngine(load_bundle(args.bundle)), Slots(1)
    target, drafter, limits = Qwen3Target(engine, slots), Drafter(engine, slots), engine.manifest.limits
    k = engine.manifest.num_speculative_tokens
    decoder = Decoder(engine, slots, target, drafter, num_speculative_tokens=k, max_seq_len=limits.max_seq_len)
    request = Request("r", [5, 6, 7], StopRule(frozenset(), args.tokens), speculative=args.speculative)
    decoder.admit(request)
    decoder.prefill(request)
    steps, grown = [], []
    while request.finish_reason is None:
        before = target.caches.capacity, drafter.rings.capacity
        began = time.perf_counter()
        decoder.round([request])
        milliseconds = 1e3 * (time.perf_counter() - began)
        if (target.caches.capacity, drafter.rings.capacity) != before:
            copied = target.caches.bytes_at(1, before[0]) + drafter.rings.bytes_at(1, before[1])
            source = np.ones(copied, np.uint8)
            began = time.perf_counter()
            source.copy()
            grown.append((len(request.output), milliseconds, copied / 1e6, 1e3 * (time.perf_counter() - began)))
        else:
            steps.append((len(request.output), milliseconds))
    print(machine.describe("onnxruntime", "numpy"))
    times = np.array([spent for _, spent in steps])
    print(f"{len(times)} steps without growth: median {np.median(times):.2f} ms, 99th percentile {np.percentile(times, 99):.2f} ms")
    print("| at token | step with growth, ms | median of its neighbours, ms | state copied, MB | a copy of so much, ms |")
    print("|---:|---:|---:|---:|---:|")
    for token, spent, megabytes, copy in grown:
        near = np.median([other for at, other in steps if abs(at - token) <= 40])
        print(f"| {token} | {spent:.2f} | {near:.2f} | {megabytes:.1f} | {copy:.2f} |")


if __name__ == "__main__":
    main()
